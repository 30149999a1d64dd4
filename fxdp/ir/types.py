"""The types of values in a graph: dtype and *global* shape of a tensor, the expression of a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch

from fxdp.ir.placements import Dim, Placement, Shard
from fxdp.ir.sizes import local_size


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor's dtype and *global* shape; sizes are ints or sympy expressions in `B`."""

    dtype: torch.dtype
    shape: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class ScalarType:
    """A SymInt, SymFloat or SymBool: its value as an expression."""

    expr: sympy.Expr


NodeType: TypeAlias = TensorType | ScalarType | tuple["TensorType | ScalarType | None", ...] | None


def local_shape(type_: TensorType, placement: Placement | None) -> tuple[Dim, ...]:
    """The shape of a rank's value of a global `type_` under `placement`, in `B` and `b`."""
    if not isinstance(placement, Shard):
        return type_.shape
    shape = list(type_.shape)
    shape[placement.dim] = local_size(shape[placement.dim])
    return tuple(shape)
