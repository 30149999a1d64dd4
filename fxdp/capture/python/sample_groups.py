"""Groups of nodes that differ only by the sample, as the iterations of a loop over the samples have them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxdp.capture.export.loop_iterations import (
    Group,
    OtherError,
    SamplePart,
    are_alike,
    is_of_operands_alone,
    memory_of,
    part_of,
    writes_of,
)
from fxdp.capture.python.erased_iterations import CONSTANT
from fxdp.ir.graph.graphs import attribute_of


class SampleGroups:
    """The operands of each group of a graph whose batch has `batch` samples."""

    def __init__(self, gm: fx.GraphModule, batch: int) -> None:
        self._gm, self._batch, self._written = gm, batch, writes_of(gm)
        self._others: set[Group] = set()  # groups that cannot be an op on all samples

    def operands_of(self, group: Group) -> list[Group]:
        """Return the groups that a group reads; raise `OtherError` if one cannot be an op on all samples."""
        try:
            if group in self._others:
                raise OtherError
            operands = self.operands(group)
            if not self._others.isdisjoint(operands):
                raise OtherError
        except OtherError:
            self._others.add(group)
            raise
        return operands

    def operands(self, group: Group) -> list[Group]:
        """Return the groups that a group reads.

        Empty for one value that all samples share, or for the samples' slices of one value.
        """
        first, *others = group
        if any(not write < node for node in group for write in self._written.get(memory_of(node), ())):
            raise OtherError
        if self.is_shared(group) or self.source(group) is not None:
            return []
        if not all(are_alike(first, node) for node in others) or not is_of_operands_alone(first):
            raise OtherError
        leaves, specs = zip(*(pytree.tree_flatten((n.args, n.kwargs)) for n in group), strict=True)
        if any(spec != specs[0] for spec in specs):
            raise OtherError
        columns = list(zip(*leaves, strict=True))
        read = [column for column in columns if all(isinstance(leaf, fx.Node) for leaf in column)]
        for column in columns:
            same = all(type(leaf) is type(column[0]) and leaf == column[0] for leaf in column)
            if column not in read and not same:
                raise OtherError
        return read

    def is_shared(self, group: Group) -> bool:
        """Return whether all nodes of a group are one value, or equal constants."""
        if len(set(group)) == 1:
            return True
        if not all(node.op == "get_attr" and CONSTANT in str(node.target) for node in group):
            return False
        first, *others = (attribute_of(self._gm, node) for node in group)
        return all(value.dtype == first.dtype and torch.equal(value, first) for value in others)

    def source(self, group: Group) -> SamplePart | None:
        """Return the first sample's slice of a value, if the iterations take all samples' slices in order."""
        first, *others = (part_of(node) for node in group)
        if first is None or first.start:
            return None
        rows = first.rows or 1
        wanted = [replace(first, start=iteration * rows) for iteration in range(1, self._batch)]
        size = first.source.meta["val"].shape[first.dim]
        return first if others == wanted and size == self._batch * rows else None
