"""The ranks of a mesh as lists: one value per rank, and what conversions do to such a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from fxdp.ir import conversions
from fxdp.ir.ops import moments
from fxdp.ir.ops.parts import combine, join_parts, take_part
from fxdp.ir.placements import Dim, Placement, Shard
from fxdp.ir.sizes import LOCAL, evaluate, rank_sizes


class VirtualRanks:
    """Ranks that hold `sizes` samples each; further dims have the sizes in `symbols`."""

    def __init__(self, sizes: Sequence[int], symbols: Mapping[str, int]) -> None:
        self.sizes = tuple(sizes)
        self.world = len(self.sizes)
        self.batch = sum(self.sizes)
        self.offsets = [0, *accumulate(self.sizes)][:-1]
        self._symbols = symbols

    def slot(self, name: str, rank: int) -> int:
        """The value of a size slot on a rank."""
        return {**self._symbols, **rank_sizes(self.sizes, rank)}[name]

    def number(self, expr: Dim, rank: int | None = None) -> int:
        """The value of a size expression, on a rank where it counts the local batch."""
        own = {} if rank is None else {LOCAL.name: self.sizes[rank]}
        return evaluate(expr, {**self._symbols, **own})

    def split(self, whole: Tensor, placement: Placement | None) -> list[Tensor]:
        """Every rank's part of a global value; the value itself where it is not sharded."""
        if not isinstance(placement, Shard):
            return [whole] * self.world
        return self._parts([whole] * self.world, placement.dim, self.number(placement.outer))

    def combine(self, values: Sequence[Tensor], placement: Placement) -> Tensor:
        """The global value that the ranks' values stand for."""
        if isinstance(placement, Shard):
            placement = Shard(placement.dim, self.number(placement.outer))
        return combine(values, placement, self.sizes)

    def convert(self, node: fx.Node, values: list[Tensor], rest: Sequence[Any]) -> list[Tensor]:
        """What an op of `fxdp.ir` makes of the ranks' values; `rest` are its further arguments."""
        if node.target is conversions.all_reduce:
            return [_reduce(values, rest[0])] * self.world
        if node.target is conversions.reduce_scatter:
            return self._parts([_reduce(values, "sum")] * self.world, rest[0], rest[1])
        if node.target is conversions.all_gather:
            return [join_parts(values, rest[0], rest[1], self.sizes)] * self.world
        if node.target is conversions.broadcast:
            return [values[0]] * self.world
        if node.target is conversions.shard:
            return self._parts(values, rest[0], rest[1])
        if node.target is conversions.partial:
            return [values[0], *(torch.zeros_like(v) for v in values[1:])]
        return values

    def _parts(self, values: Sequence[Tensor], dim: int, outer: int) -> list[Tensor]:
        return [
            take_part(value, dim, outer, self.batch, start, size)
            for value, start, size in zip(values, self.offsets, self.sizes, strict=True)
        ]


def _reduce(values: Sequence[Tensor], op: str) -> Tensor:
    stacked = torch.stack(tuple(values))
    if op == "sum":
        return stacked.sum(0).to(values[0].dtype)
    if op in ("max", "min"):
        return stacked.amax(0) if op == "max" else stacked.amin(0)
    if op == "moments":
        return moments.combine(stacked)
    raise NotImplementedError(f"all_reduce by {op}")
