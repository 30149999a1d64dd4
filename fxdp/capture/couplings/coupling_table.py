"""The table of decompositions that capture hands to torch, and what asks "does this dim hold the batch?"."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sympy
import torch

from fxdp.torch_compat import OpOverload

Coupling = TypeVar("Coupling", bound=Callable[..., Any])

_FAMILIES = ("statistics", "mean_losses", "batch_norm", "strided_views")
_COUPLINGS: dict[OpOverload, Callable[..., Any]] = {}


@dataclass(frozen=True)
class BatchSymbols:
    """Knows the symbols of the batch size; without symbols (a static trace) any size may be it.

    `own_statistics`: BatchNorm normalizes each part of the batch by the part's own statistics.
    """

    symbols: frozenset[sympy.Symbol] | None = None
    own_statistics: bool = False

    def among(self, sizes: Iterable[int | torch.SymInt]) -> bool:
        """Whether one of the sizes depends on the batch."""
        if self.symbols is None:
            return True
        return any(
            not self.symbols.isdisjoint(size.node.expr.free_symbols)
            for size in sizes
            if isinstance(size, torch.SymInt)
        )


def couples(*ops: OpOverload) -> Callable[[Coupling], Coupling]:
    """Register `function(batch, *args)` as the decomposition of ops; it may return NotImplemented."""

    def register(function: Coupling) -> Coupling:
        for op in ops:
            _COUPLINGS[op] = function
        return function

    return register


def coupling_table(batch: BatchSymbols) -> dict[Any, Callable[..., Any]]:
    """`{op: decomposition}` in the form that torch's joint export takes."""
    for family in _FAMILIES:
        importlib.import_module(f"fxdp.capture.couplings.{family}")
    return {op: functools.partial(function, batch) for op, function in _COUPLINGS.items()}


def normal_dims(x: torch.Tensor, dims: int | Sequence[int] | None) -> list[int]:
    """The dims of a reduction, counted from the front; None and [] mean all of them."""
    if isinstance(dims, int):
        dims = [dims]
    return [dim % x.dim() for dim in dims] if dims and x.dim() else list(range(x.dim()))


def count(x: torch.Tensor, dims: Iterable[int]) -> Any:
    """The number of elements that a reduction over `dims` adds up: global, maybe symbolic."""
    product: Any = 1
    for dim in dims:
        product = product * x.shape[dim]
    return product


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in: eager kernels accumulate half precision in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
