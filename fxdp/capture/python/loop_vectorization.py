"""Loop vectorization: replace a loop over the samples by ops on all samples at once.

    stack([f(x[0]), f(x[1]), ..., f(x[b - 1])])         vmap(f)(x)
    f(x[0]) + f(x[1]) + ... + f(x[b - 1])               vmap(f)(x).sum(0)

A loop over the batch has one iteration per sample, so static traces of several batch sizes would not fit
together. Nodes that differ only by the sample form a group, and a group becomes one node: the same op on a
value with a row per sample. Iterations that no op on all samples can replace remain a sequential loop
(`sequential_loops.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxdp.capture.export.loop_iterations import (
    Group,
    OtherError,
    SamplePart,
    dim_at,
    is_sum,
    memory_of,
    ways_of,
    writes_of,
)
from fxdp.capture.python.each_sample import for_each
from fxdp.capture.python.erased_iterations import erase_iterations, renumber_constants
from fxdp.capture.python.sample_groups import SampleGroups
from fxdp.capture.python.sequential_loops import SequentialLoop
from fxdp.ir.graph.graphs import argument
from fxdp.ir.ops.sequential_sample_loop import LOOP_OP
from fxdp.torch_compat import aten

_TERMS = range(1, 5)
"""Numbers of values per iteration that may be added one after another."""
_STACK, _CAT, _PAD = aten.stack.default, aten.cat.default, aten.pad_sequence.default


@dataclass(frozen=True)
class _Rows:
    """The result of a group: one value shared by all samples, or, if `apart`, a row per sample in dim 0."""

    node: fx.Node
    apart: bool


def merge_loops(gm: fx.GraphModule, batch: int) -> None:
    """Replace joins and sums of values of loops over `batch` samples by ops on all samples, in place."""
    loops = _Loops(gm, batch)
    for node in list(gm.graph.nodes):
        if node.target is aten.type_as.default:  # of the second operand only the dtype is read
            node.target, node.args = aten.to.dtype, (node.args[0], node.meta["val"].dtype)
        if node.target in (_STACK, _CAT, _PAD):
            loops.join(node)
        elif is_sum(node):
            loops.add(node)
    erase_iterations(gm, loops.unread, loops.writes)
    renumber_constants(gm)
    gm.recompile()


class _Loops:
    """The nodes that replace the groups of a graph."""

    def __init__(self, gm: fx.GraphModule, batch: int) -> None:
        self.gm, self.graph, self.batch = gm, gm.graph, batch
        self.groups = SampleGroups(gm, batch)
        self.writes = writes_of(gm, own_sums=True)
        self.known: dict[Group, _Rows] = {}
        self.unread: dict[fx.Node, None] = {}
        """Nodes to erase if unread: members of groups, nodes that joined members, failed attempts."""

    def join(self, node: fx.Node) -> None:
        """Replace a `stack`, `cat` or `pad_sequence` with equally many values per iteration of loops."""
        parts: Any = node.args[0]
        each, rest = divmod(len(parts), self.batch)
        if rest or (node.target is _PAD and each > 1) or not all(isinstance(part, fx.Node) for part in parts):
            return
        with self.graph.inserting_before(node):
            made = self._joined(node, parts)
            if made is None and each > 1:
                made = self._merged_loops(node, parts)
        if made is not None:
            self._replace(node, made)

    def _joined(self, node: fx.Node, parts: Sequence[fx.Node]) -> fx.Node | None:
        """Return the join of the values of one loop as one node; None if the iterations differ."""
        each = len(parts) // self.batch
        rows = self._all_rows([tuple(parts[iteration::each]) for iteration in range(each)], node)
        if rows is None:
            return None
        dim = dim_at(node, 1) % node.meta["val"].dim()
        if node.target is _PAD:  # rows of all samples have equal lengths
            dim = 0 if argument(node, "batch_first") else 1
        if node.target is not _CAT:
            flat = self._call(node, aten.flatten.using_ints, self._call(node, _STACK, rows, 1), 0, 1)
            return self._call(node, aten.movedim.int, flat, 0, dim)
        moved = self._call(node, aten.movedim.int, self._call(node, _CAT, rows, dim + 1), 0, dim)
        return self._call(node, aten.flatten.using_ints, moved, dim, dim + 1)

    def _merged_loops(self, node: fx.Node, parts: Sequence[fx.Node]) -> fx.Node | None:
        """Return the join of the values of consecutive loops; None if iterations of a loop differ."""
        starts = range(0, len(parts), self.batch)
        loops = [self._joined(node, parts[start : start + self.batch]) for start in starts]
        dim = dim_at(node, 1) % node.meta["val"].dim()
        return None if None in loops else self._call(node, _CAT, loops, dim)

    def add(self, node: fx.Node) -> None:
        """Replace a chain of sums over iterations, starting from nothing, a number or a value."""
        with self.graph.inserting_before(node):
            any(self._add(node, each) for each in _TERMS)

    def _add(self, node: fx.Node, each: int) -> bool:
        """Try to replace the chain by sums over all samples, with `each` values per iteration.

        Returns whether the chain was replaced.
        """
        branches, sums = ways_of(node, self.batch, each)
        for groups, start in branches:
            if (rows := self._all_rows([group for group, _ in groups], node)) is None:
                continue
            added = [self._sum(node, one, sign) for one, (_, sign) in zip(rows, groups, strict=True)]
            added += [] if start is None else [start]
            plus = operator.add if _is_of_numbers(node) else aten.add.Tensor
            self._replace(node, reduce(partial(self._call, node, plus), added))
            self.unread |= dict.fromkeys(sums)
            return True
        return False

    def _sum(self, node: fx.Node, rows: fx.Node, sign: int) -> fx.Node:
        """Return the signed sum over all samples, in the dtype in which the loop adds.

        If the loop adds Python numbers, the sum is a number, too.
        """
        made = self._call(node, aten.sum.dim_IntList, rows, [0])
        if not _is_of_numbers(node):
            made.kwargs = {"dtype": node.meta["val"].dtype}
        made = made if sign > 0 else self._call(node, aten.neg.default, made)
        return self._call(node, aten.item.default, made) if _is_of_numbers(node) else made

    def _all_rows(self, groups: Sequence[Group], reader: fx.Node) -> list[fx.Node] | None:
        """Return a value with a row per sample for each group.

        None if iterations differ, or if no term of a sum depends on the sample.
        """
        try:
            found = [self._rows_or_iterations(group, reader) for group in groups]
        except OtherError:
            return None
        if is_sum(reader) and not any(rows.apart for rows in found):
            return None
        return [rows.node if rows.apart else self._spread(rows.node, reader) for rows in found]

    def _spread(self, node: fx.Node, joined: fx.Node) -> fx.Node:
        sizes = [self.batch, *node.meta["val"].shape]
        return self._call(joined, aten.expand.default, node, sizes)

    def _rows(self, wanted: Group) -> _Rows:
        """Return the result of a group, and compute operands first.

        Without recursion, because iterations may have very many ops.
        """
        left = [wanted]
        while left:
            missing = [group for group in self.groups.operands_of(left[-1]) if group not in self.known]
            if missing:
                left += missing
                continue
            group = left.pop()
            if group not in self.known:
                self.known[group] = self._made(group)
        return self.known[wanted]

    def _is_for_all(self, group: Group) -> bool:
        """Return whether a group can be an op on all samples."""
        try:
            self._rows(group)
        except OtherError:
            return False
        return True

    def _rows_or_iterations(self, group: Group, reader: fx.Node) -> _Rows:
        return self._rows(group) if self._is_for_all(group) else self._iterations(group, reader)

    def _iterations(self, group: Group, reader: fx.Node) -> _Rows:
        """Keep a group as a sequential loop over the parts of the iterations that run before `reader`."""
        iteration = SequentialLoop(group, self._is_given, self.writes, reader)
        read = [(operands, self._rows(operands)) for operands in iteration.read]
        if not all(_is_tensor(operands[0]) for operands, _ in read):
            raise OtherError
        apart = [(operands, rows.node) for operands, rows in read if rows.apart]
        shared = [(operands, rows.node) for operands, rows in read if not rows.apart]
        if not apart:
            raise OtherError
        code = iteration.code([operands for operands, _ in (*apart, *shared)])
        self.unread |= dict.fromkeys(iteration.nodes)
        values = [[node for _, node in part] for part in (apart, shared)]
        made = _Rows(self._call(reader, LOOP_OP, *values, code, iteration.result), apart=True)
        return self.known.setdefault(group, made)

    def _is_given(self, group: Group) -> bool:
        """Return whether a group is vectorized and not written later, so that loops can read the group."""
        late = any(not write < node for node in group for write in self.writes.get(memory_of(node), ()))
        return not late and self._is_for_all(group)

    def _made(self, group: Group) -> _Rows:
        first = group[0]
        if self.groups.is_shared(group):
            self.unread |= dict.fromkeys(node for node in group[1:] if node is not first)
            return _Rows(first, apart=False)
        self.unread |= dict.fromkeys(group)
        source = self.groups.source(group)
        if source is not None:
            return _Rows(self._parted(source, first), apart=True)
        read = [self.known[operands] for operands in self.groups.operands(group)]
        if not any(rows.apart for rows in read):
            return _Rows(first, apart=False)
        columns = iter(read)
        args, kwargs = pytree.tree_map_only(fx.Node, lambda _: next(columns).node, (first.args, first.kwargs))
        if first.target is operator.getitem:
            return _Rows(self._call(first, operator.getitem, *args), apart=True)
        dims = [0 if rows.apart else None for rows in read if _is_tensor(rows.node) or rows.apart]
        return _Rows(self._call(first, for_each, first.target, dims, args, kwargs), apart=True)

    def _parted(self, first: SamplePart, taken: fx.Node) -> fx.Node:
        """Return the value that the samples slice, reshaped to a row per sample in dim 0."""
        source = first.source
        if first.rows is not None:
            sizes = [self.batch, first.rows]
            source = self._call(taken, aten.unflatten.int, source, first.dim, sizes)
        return self._call(taken, aten.movedim.int, source, first.dim, 0) if first.dim else source

    def _call(self, like: fx.Node, target: Any, *args: Any) -> fx.Node:
        """Add a node with the metadata of `like`."""
        made = self.graph.call_function(target, args)
        made.meta = {key: value for key, value in like.meta.items() if key != "val"}
        self.unread[made] = None
        return made

    def _replace(self, node: fx.Node, made: fx.Node) -> None:
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        self.unread[node] = None


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_of_numbers(node: fx.Node) -> bool:
    """Return whether a sum is of Python numbers, not of tensors."""
    return node.target in (operator.add, operator.sub)
