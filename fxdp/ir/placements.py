"""Where a global tensor lives along the one logical batch axis: `R`, `P(sum)` or `S(dim, outer)`.

All data axes of the mesh (and, later, micro-batches) split the same logical axis, so one placement
per tensor is enough; `to_dtensor` spells it in DTensor's words for a real mesh.

`S(dim, outer)` is richer than `Shard(dim)`: the dim factorises as `outer x batch x inner` and a rank
holds its contiguous range of the batch factor for every outer index. `(T, B, H).view(T*B, H)` is
`S(0, T)` and `cat([z1, z2])` of two `S(0)` is `S(0, 2)`, both without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy

Dim: TypeAlias = "int | sympy.Expr"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the whole, equal value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a term; the value is their reduction by `op`.

    `sum`: the terms add up. `max`, `min`: the most extreme term counts, a nan above all. `moments`: each
    term is `fxdp.ir.ops.moments.moments` of the rank's own elements.
    """

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


@dataclass(frozen=True, slots=True)
class Shard:
    """Every rank holds its range of the batch factor of `dim` for each of `outer` indices."""

    dim: int
    outer: Dim = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim}, {self.outer})"


Placement: TypeAlias = Replicate | Partial | Shard


def per_axis(placement: Placement | None, axes: Sequence[str]) -> dict[str, Placement | None]:
    """The placement along each data axis of a mesh: the same, as all of them split the one batch axis."""
    return dict.fromkeys(axes, placement)


R = Replicate()
P = Partial()
MOMENTS = Partial("moments")


def S(dim: int, outer: Dim = 1) -> Shard:  # noqa: N802 - the letter that goldens and DTensor print
    """Short for `Shard(dim, outer)`."""
    return Shard(dim, outer)
