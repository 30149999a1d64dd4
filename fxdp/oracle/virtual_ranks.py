"""The ranks of a mesh as lists with one value per rank, and the effect of redistributions on such lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxdp.ir.graph.metadata import meta
from fxdp.ir.ops.collectives import sharded
from fxdp.ir.ops.parameter_shards import own_shard
from fxdp.ir.ops.parts import combine
from fxdp.ir.redistributions import redistribution_of
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import Dim, ParamShard, Placement, Shard
from fxdp.ir.types.sizes import Axis, Split, axis_of, by_axis, evaluate, rank_sizes
from fxdp.ir.types.value_types import NodeType, TensorType


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
        return evaluate(expr, {**self._symbols, **own})

    def split(self, full: Tensor, placement: Placement | None, type_: NodeType) -> list[Tensor]:
        """Return every rank's part of a global value; the full value for placements that are not sharded."""
        if isinstance(placement, ParamShard):
            return self._shards(full, placement)
        if not isinstance(placement, Shard):
            return [full] * self.world
        sizes = self._sizes_of(type_, placement.dim)
        return sharded([full] * self.world, sizes, placement.dim, self.number(placement.outer))

    def combine(self, values: Sequence[Tensor], placement: Placement, type_: NodeType) -> Tensor:
        """Combine the values of the ranks into the global value."""
        if isinstance(placement, ParamShard):  # ranks with equal shards follow from the first group
            return torch.cat([values[rank] for rank in self._along(placement.axis)[0]])
        if not isinstance(placement, Shard):
            return combine(values, placement, self.sizes)
        sizes = self._sizes_of(type_, placement.dim)
        return combine(values, Shard(placement.dim, self.number(placement.outer)), sizes)

    def entered(self, values: Sequence[Tensor], axis: Axis) -> list[Tensor]:
        """Return global row numbers of an axis as each rank's caller counts these."""
        offsets = (rank_sizes(self.sizes, rank)[axis.offset.name] for rank in range(self.world))
        return [value - offset for value, offset in zip(values, offsets, strict=True)]

    def _sizes_of(self, type_: NodeType, dim: int) -> Sequence[int]:
        """Return the ranks' sizes of the axis along a dim."""
        found = axis_of(type_.shape[dim]) if isinstance(type_, TensorType) else None
        return by_axis(self.sizes)["" if found is None else found.name]

    def redistribute(self, node: fx.Node, values: Sequence[Any], rest: Sequence[Any]) -> list[Tensor]:
        """Apply a redistribution to the values of the ranks; `rest` are the further arguments."""
        found = redistribution_of(node)
        if found is None:  # a wait
            return list(values)
        made: dict[int, Tensor] = {}
        for ranks in self._along(found.axis):
            of_ranks: Sequence[int] = self.sizes
            if found.takes is Shard or found.gives is Shard:
                of_ranks = self._sizes_of(meta(node).type, node.args[1])  # type: ignore[arg-type]
            own, sizes = [values[rank] for rank in ranks], [of_ranks[rank] for rank in ranks]
            made.update(zip(ranks, found.on_ranks(own, sizes, *rest), strict=True))
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
