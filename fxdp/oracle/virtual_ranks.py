"""The ranks of a mesh as lists: one value per rank, and what redistributions do to such a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxdp.ir.mesh import Mesh
from fxdp.ir.ops.collectives import sharded
from fxdp.ir.ops.parameter_shards import own_shard
from fxdp.ir.ops.parts import combine
from fxdp.ir.placements import Dim, ParamShard, Placement, Shard
from fxdp.ir.redistributions import redistribution_of
from fxdp.ir.sizes import LOCAL, evaluate, rank_sizes


class VirtualRanks:
    """Ranks that hold `sizes` samples each; further dims have the sizes in `symbols`.

    `mesh` tells which of them lie along an axis; without it there is one axis.
    """

    def __init__(self, sizes: Sequence[int], symbols: Mapping[str, int], mesh: Mesh | None = None) -> None:
        self.sizes = tuple(sizes)
        self.world = len(self.sizes)
        self._symbols = symbols
        self._mesh = mesh

    def spec(self, name: str, rank: int) -> int:
        """The value of a size slot on a rank."""
        return {**self._symbols, **rank_sizes(self.sizes, rank)}[name]

    def number(self, expr: Dim, rank: int | None = None) -> int:
        """The value of a size expression, on a rank where it counts the local batch."""
        own = {} if rank is None else {LOCAL.name: self.sizes[rank]}
        return evaluate(expr, {**self._symbols, **own})

    def split(self, full: Tensor, placement: Placement | None) -> list[Tensor]:
        """Every rank's part of a global value; the value itself where it is not sharded."""
        if isinstance(placement, ParamShard):
            return self._shards(full, placement)
        if not isinstance(placement, Shard):
            return [full] * self.world
        return sharded([full] * self.world, self.sizes, placement.dim, self.number(placement.outer))

    def combine(self, values: Sequence[Tensor], placement: Placement) -> Tensor:
        """The global value that the ranks' values stand for."""
        if isinstance(
            placement, ParamShard
        ):  # ranks that hold equal rows follow from those of the first of them
            return torch.cat([values[rank] for rank in self._along(placement.axis)[0]])
        if isinstance(placement, Shard):
            placement = Shard(placement.dim, self.number(placement.outer))
        return combine(values, placement, self.sizes)

    def redistribute(self, node: fx.Node, values: Sequence[Any], rest: Sequence[Any]) -> list[Tensor]:
        """What a redistribution makes of the ranks' values; `rest` are its further arguments."""
        found = redistribution_of(node)
        if found is None:  # a wait
            return list(values)
        made: dict[int, Tensor] = {}
        for ranks in self._along(found.axis):
            own, sizes = [values[rank] for rank in ranks], [self.sizes[rank] for rank in ranks]
            made.update(zip(ranks, found.on_ranks(own, sizes, *rest), strict=True))
        return [made[rank] for rank in range(self.world)]

    def _shards(self, full: Tensor, placement: ParamShard) -> list[Tensor]:
        """Each rank's rows, which those beside it along another axis hold, too."""
        made: dict[int, Tensor] = {}
        for ranks in self._along(placement.axis):
            made.update({rank: own_shard(full, len(ranks), place) for place, rank in enumerate(ranks)})
        return [made[rank] for rank in range(self.world)]

    def _along(self, axis: str | None) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that convert among themselves."""
        return (tuple(range(self.world)),) if self._mesh is None else self._mesh.along(axis)
