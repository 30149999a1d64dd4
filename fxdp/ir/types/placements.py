"""Placements of a global tensor: `R`, `P(sum)` or `S(dim, outer)` along the batch axis, or `ParamShard`.

All data axes of the mesh (and, later, micro-batches) split the same logical axis, so one placement per tensor
is enough; `fxdp/ir/graph/dtensor_specs.py` translates it to DTensor's placements.

`S(dim, outer)` is richer than `Shard(dim)`: the dim factorises as `outer x batch x inner` and a rank holds
its contiguous range of the batch factor for every outer index. `(T, B, H).view(T*B, H)` is `S(0, T)` and
`cat([z1, z2])` of two `S(0)` is `S(0, 2)`, both without communication.

`ParamShard` does not depend on the batch: it is the placement of a sharded parameter between uses, equal at
each call, and DTensor's own `Shard(0)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy

Dim: TypeAlias = "int | sympy.Expr"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Placement: every rank holds the full, equal value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Placement: every rank holds a term; the value is the reduction of all terms by `op`.

    `sum`: the terms add up. `max`, `min`: the most extreme term counts, a nan above all. `moments`: each term
    is `fxdp.ir.ops.moments.moments` of the rank's own elements.
    """

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


@dataclass(frozen=True, slots=True)
class Shard:
    """Placement: every rank holds a range of the batch factor of `dim`, for each of `outer` indices."""

    dim: int
    outer: Dim = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim}, {self.outer})"


@dataclass(frozen=True, slots=True)
class ParamShard:
    """Placement: every rank holds rows of dim 0, `ceil(rows / ranks)` each, the last ranks fewer or none.

    Attributes
    ----------
    axis : the data axis along which the parameter is sharded, if the mesh has a second one along which it is
        replicated.
    terms : ranks along the second axis hold terms of a sum that is still to be reduced.
    """

    axis: str | None = None
    terms: bool = False

    def __str__(self) -> str:
        return "ParamShard" if self.axis is None else f"ParamShard({self.axis})"


Placement: TypeAlias = Replicate | Partial | Shard | ParamShard


def per_axis(placement: Placement | None, axes: Sequence[str]) -> dict[str, Placement | None]:
    """Return the placement along each data axis of a mesh.

    All data axes have equal placements, because they split the one batch axis. `ParamShard` is the exception:
    its rows are sharded along one axis alone, and along no axis of the mesh for post-forward shards.
    """
    if isinstance(placement, ParamShard) and placement.axis in axes:
        return {
            axis: ParamShard() if axis == placement.axis else P if placement.terms else R for axis in axes
        }
    return dict.fromkeys(axes, placement)


def sharded_axis(placement: Placement) -> str | None:
    """Return the data axis along which a `ParamShard` is sharded, if there are several, else None."""
    return placement.axis if isinstance(placement, ParamShard) else None


def has_terms(placement: Placement) -> bool:
    """Return whether a placement is a `ParamShard` of terms of a sum."""
    return isinstance(placement, ParamShard) and placement.terms


R = Replicate()
P = Partial()
MOMENTS = Partial("moments")


def S(dim: int, outer: Dim = 1) -> Shard:  # noqa: N802 - the letter that goldens and DTensor print
    """Return `Shard(dim, outer)`, in the short form of graph text."""
    return Shard(dim, outer)
