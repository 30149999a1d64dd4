"""Types of values in a graph: dtype and *global* shape of a tensor, the expression of a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch

from fxdp.ir.types.placements import Dim, Placement, Shard
from fxdp.ir.types.sizes import evaluate, hint, local_size


@dataclass(frozen=True, slots=True)
class TensorType:
    """Dtype and *global* shape of a tensor; sizes are ints or sympy expressions in `B`."""

    dtype: torch.dtype
    shape: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class ScalarType:
    """Type of a SymInt, SymFloat or SymBool: the value as an expression."""

    expr: sympy.Expr


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


NodeType: TypeAlias = TensorType | ScalarType | tuple["TensorType | ScalarType | None", ...] | None


def tensor_types(type_: NodeType) -> tuple[TensorType, ...]:
    """Return the tensor types in the type of a node: one, several, or none."""
    if isinstance(type_, TensorType):
        return (type_,)
    return tuple(t for t in type_ if isinstance(t, TensorType)) if isinstance(type_, tuple) else ()


def is_static(type_: TensorType) -> bool:
    """Return whether the size is equal for all batches."""
    return all(isinstance(n, int) for n in type_.shape)


def type_bytes(
    type_: NodeType, values: Mapping[str, int] | None = None, *, batch: int = 64, unknown: int | None = None
) -> int:
    """Return the bytes of a global value, summed over the tensors of a tuple; 0 without tensors.

    Parameters
    ----------
    values, unknown : values of the symbols of sizes, as for `evaluate`.
    batch : batch size from which `hint` estimates sizes if `values` is None.
    """

    total = 0
    for one in tensor_types(type_):
        count = one.dtype.itemsize
        for n in one.shape:  # a product of expressions is slow: multiply dim by dim, most are ints
            if type(n) is int:
                count *= n
            else:
                count *= hint(n, batch) if values is None else evaluate(n, values, unknown=unknown)
        total += count
    return total


def local_shape(type_: TensorType, placement: Placement | None) -> tuple[Dim, ...]:
    """Return the shape of a rank's local value of a global `type_` under `placement`, in `B` and `b`."""
    if not isinstance(placement, Shard):
        return type_.shape
    shape = list(type_.shape)
    shape[placement.dim] = local_size(shape[placement.dim])
    return tuple(shape)
