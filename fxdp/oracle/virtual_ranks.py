"""The ranks of a mesh as lists with one value per rank, and the effect of redistributions on such lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxdp.ir.graph.metadata import meta, tensor_operands
from fxdp.ir.ops.collectives import sharded
from fxdp.ir.ops.parameter_shards import own_shard
from fxdp.ir.ops.parts import combine, unflatten
from fxdp.ir.redistributions import redistribution_of
from fxdp.ir.types.born_axes import in_parts
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import Dim, ParamShard, Placement, Shard
from fxdp.ir.types.sizes import Axis, Split, axis_of, by_axis, evaluate, rank_sizes
from fxdp.ir.types.value_types import NodeType, TensorType


class LateValues(dict[fx.Node, Any]):
    """Values by node; those of placeholders that have none yet are split when first read."""

    def __init__(self, split: Callable[[fx.Node], Any]) -> None:
        self._split = split

    def __missing__(self, node: fx.Node) -> Any:
        self[node] = made = self._split(node)
        return made


def _picked(value: Tensor, dim: int, outer: int, rows: Tensor | None) -> Tensor:
    """Return these rows of each of the `outer` blocks along a dim; None for all in order."""
    if rows is None:
        return value
    inner = value.shape[dim] // (outer * len(rows)) if len(rows) else 1
    blocks = unflatten(value, dim, outer, len(rows), inner)
    return blocks.index_select(dim + 1, rows).flatten(dim, dim + 2)


class VirtualRanks:
    """Ranks that hold `sizes` samples each; further dims have the sizes in `symbols`.

    `mesh` gives the arrangement of the ranks along axes; None stands for a single axis.
    """

    def __init__(self, sizes: Sequence[int], symbols: Mapping[str, int], mesh: Mesh | None = None) -> None:
        self.sizes = sizes if isinstance(sizes, Split) else tuple(sizes)
        self.world = len(self.sizes)
        self._symbols = symbols
        self._mesh = mesh

    def spec(self, name: str, rank: int) -> int:
        """Return the value of a size input on a rank."""
        return {**self._symbols, **rank_sizes(self.sizes, rank)}[name]

    def number(self, expr: Dim, rank: int | None = None) -> int:
        """Return the value of a size expression, with the local batch size of `rank` if given."""
        own = {} if rank is None else rank_sizes(self.sizes, rank)
        born = {f"B_{name}": size for name, size in self._symbols.items()}  # also where no rank has a part
        return evaluate(in_parts(sympy.sympify(expr)), {**born, **self._symbols, **own})

    def learn(self, node: fx.Node, values: Sequence[Any], read: Mapping[fx.Node, Sequence[Any]]) -> None:
        """Learn the ranks' sizes of an axis born inside from the first value that has rows of it.

        `read` has the values of the node's operands, of which a mask tells the sizes of runs.
        """
        type_, placement = meta(node).type, meta(node).placement
        if not isinstance(type_, TensorType) or not isinstance(placement, Shard):
            return
        of, known = axis_of(type_.shape[placement.dim]), by_axis(self.sizes)
        if of is None or "+" in of.name or of.name in known:
            return
        found = {of.name: [value.shape[placement.dim] for value in values]}
        if not of.is_contiguous:
            masks = (mask.reshape(len(of.parts), -1) for mask in read[tensor_operands(node)[-1]])
            counts = [mask.count_nonzero(1).tolist() for mask in masks]
            found |= zip(of.parts, map(list, zip(*counts, strict=True)), strict=True)
        self.sizes = Split(self.sizes, {**{n: s for n, s in known.items() if n}, **found})

    def split(self, full: Tensor, placement: Placement | None, type_: NodeType) -> list[Tensor]:
        """Return every rank's part of a global value; the full value for placements that are not sharded."""
        if isinstance(placement, ParamShard):
            return self._shards(full, placement)
        if not isinstance(placement, Shard):
            return [full] * self.world
        sizes, rows = self._sizes_of(type_, placement.dim), self._rows(type_, placement.dim)
        full = _picked(full, placement.dim, self.number(placement.outer), rows)
        return sharded([full] * self.world, sizes, placement.dim, self.number(placement.outer))

    def combine(self, values: Sequence[Tensor], placement: Placement, type_: NodeType) -> Tensor:
        """Combine the values of the ranks into the global value."""
        if isinstance(placement, ParamShard):  # ranks with equal shards follow from the first group
            found = torch.cat([values[rank] for rank in self._along(placement.axis)[0]])
            return found[: int(type_.shape[0])] if isinstance(type_, TensorType) else found  # without padding
        if not isinstance(placement, Shard):
            return combine(values, placement, self.sizes)
        sizes, rows = self._sizes_of(type_, placement.dim), self._rows(type_, placement.dim)
        outer = self.number(placement.outer)
        found = combine(values, Shard(placement.dim, outer), sizes)
        return _picked(found, placement.dim, outer, None if rows is None else rows.argsort())

    def entered(self, values: Sequence[Tensor], axis: Axis) -> list[Tensor]:
        """Return global row numbers of an axis as each rank's caller counts these."""
        offsets = (rank_sizes(self.sizes, rank)[axis.offset.name] for rank in range(self.world))
        return [value - offset for value, offset in zip(values, offsets, strict=True)]

    def _sizes_of(self, type_: NodeType, dim: int) -> Sequence[int]:
        """Return the ranks' sizes of the axis along a dim."""
        found = axis_of(type_.shape[dim]) if isinstance(type_, TensorType) else None
        known = by_axis(self.sizes)
        parts = [known[name] for name in (("",) if found is None else found.parts)]
        return [sum(sizes) for sizes in zip(*parts, strict=True)]

    def _rows(self, type_: NodeType, dim: int) -> Tensor | None:
        """Return the global rows of concatenated axes in the order of the ranks; None for a single axis."""
        found = axis_of(type_.shape[dim]) if isinstance(type_, TensorType) else None
        if found is None or found.is_contiguous:
            return None
        known, first, blocks = by_axis(self.sizes), 0, []
        for name in found.parts:
            rows = torch.arange(first, first + sum(known[name]))
            blocks.append(rows.split(list(known[name])))  # type: ignore[no-untyped-call]
            first += sum(known[name])
        return torch.cat([block for of_rank in zip(*blocks, strict=True) for block in of_rank])

    def redistribute(self, node: fx.Node, values: Sequence[Any], rest: Sequence[Any]) -> list[Tensor]:
        """Apply a redistribution to the values of the ranks; `rest` are the further arguments."""
        found = redistribution_of(node)
        if found is None:  # a wait
            return list(values)
        made: dict[int, Tensor] = {}
        for ranks in self._along(found.axis):
            of_ranks, rows = self.sizes, None
            if found.takes is Shard or found.gives is Shard:
                of_ranks = self._sizes_of(meta(node).type, node.args[1])  # type: ignore[arg-type, assignment]
                rows = self._rows(meta(node).type, node.args[1])  # type: ignore[arg-type]
            own, sizes = [values[rank] for rank in ranks], [of_ranks[rank] for rank in ranks]
            if found.gives is Shard:
                own = [_picked(value, rest[0], rest[1], rows) for value in own]
            results = found.on_ranks(own, sizes, *rest)
            if found.takes is Shard and rows is not None:
                results = [_picked(value, rest[0], rest[1], rows.argsort()) for value in results]
            made.update(zip(ranks, results, strict=True))
        return [made[rank] for rank in range(self.world)]

    def _shards(self, full: Tensor, placement: ParamShard) -> list[Tensor]:
        """Return each rank's shard; ranks beside each other along a second axis hold equal shards."""
        made: dict[int, Tensor] = {}
        for ranks in self._along(placement.axis):
            made.update({rank: own_shard(full, len(ranks), place) for place, rank in enumerate(ranks)})
        return [made[rank] for rank in range(self.world)]

    def _along(self, axis: str | None) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that communicate with each other."""
        return (tuple(range(self.world)),) if self._mesh is None else self._mesh.along(axis)
