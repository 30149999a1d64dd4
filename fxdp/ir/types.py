"""The types of values in a graph: dtype and *global* shape of a tensor, the expression of a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch

from fxdp.ir.placements import Dim, Placement, Shard
from fxdp.ir.sizes import evaluate, hint, local_size


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor's dtype and *global* shape; sizes are ints or sympy expressions in `B`."""

    dtype: torch.dtype
    shape: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class ScalarType:
    """A SymInt, SymFloat or SymBool: its value as an expression."""

    expr: sympy.Expr


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


NodeType: TypeAlias = TensorType | ScalarType | tuple["TensorType | ScalarType | None", ...] | None


def tensor_types(type_: NodeType) -> tuple[TensorType, ...]:
    """The tensors that a node of this type gives: one, several, or none."""
    if isinstance(type_, TensorType):
        return (type_,)
    return tuple(t for t in type_ if isinstance(t, TensorType)) if isinstance(type_, tuple) else ()


def is_static(type_: TensorType) -> bool:
    """Whether the size is the same for all batches."""
    return all(isinstance(n, int) for n in type_.shape)


def type_bytes(
    type_: NodeType, values: Mapping[str, int] | None = None, *, batch: int = 64, unknown: int | None = None
) -> int:
    """The bytes of a global value, all tensors of a tuple together; 0 for what is no tensor.

    Parameters
    ----------
    values, unknown : of the symbols of sizes, as `evaluate` takes them.
    batch : without `values`, sizes are typical ones for a batch of this size, as `hint` says.
    """

    total = 0
    for one in tensor_types(type_):
        count = one.dtype.itemsize
        for n in one.shape:  # a product of expressions is slow: each dim by itself, most of them ints
            if type(n) is int:
                count *= n
            else:
                count *= hint(n, batch) if values is None else evaluate(n, values, unknown=unknown)
        total += count
    return total


def local_shape(type_: TensorType, placement: Placement | None) -> tuple[Dim, ...]:
    """The shape of a rank's value of a global `type_` under `placement`, in `B` and `b`."""
    if not isinstance(placement, Shard):
        return type_.shape
    shape = list(type_.shape)
    shape[placement.dim] = local_size(shape[placement.dim])
    return tuple(shape)
