"""The table of cross-sample decompositions that capture passes to torch; each decomposes an `OpCall`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from fxdp.ir.graph.graphs import argument_of
from fxdp.ir.types.sizes import fixed_by_data
from fxdp.torch_compat import OpOverload

_FAMILIES = ("statistics", "mean_losses", "batch_norm", "strided_views")


@dataclass(frozen=True)
class BatchSymbols:
    """The symbols of batch sizes; None (in a static trace) treats every size as a batch size.

    `own_statistics`: BatchNorm normalizes each part of the batch by statistics of the part.
    """

    symbols: frozenset[sympy.Symbol] | None = None
    own_statistics: bool = False

    def among(self, sizes: Iterable[int | torch.SymInt]) -> bool:
        """Return whether one of the sizes depends on the batch, or counts rows that values select."""
        if self.symbols is None:  # decomposing an op that does not combine samples is exact, too
            return True
        return any(
            not self.symbols.isdisjoint(size.node.expr.free_symbols) or fixed_by_data(size.node.expr)
            for size in sizes
            if isinstance(size, torch.SymInt)
        )


@dataclass(frozen=True)
class OpCall:
    """One call of an op, with arguments by their names in the op's schema, defaults included."""

    op: OpOverload
    batch: BatchSymbols
    arguments: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the argument that has one of these names, for overloads with different names."""
        return next((self.arguments[name] for name in names if name in self.arguments), default)

    def holds_batch(self, name: str) -> bool:
        """Return whether a size of the tensor argument `name` depends on the batch."""
        return self.batch.among(self[name].shape)

    def again(self, function: Callable[..., Any] | None = None, **changed: Any) -> Any:
        """Call the op (or another function with the op's signature) with some arguments changed."""
        values = {**self.arguments, **changed}
        keywords = {a.name for a in self.op._schema.arguments if a.kwarg_only}
        args = [value for name, value in values.items() if name not in keywords]
        kwargs = {name: value for name, value in values.items() if name in keywords}
        return (function or self.op)(*args, **kwargs)


CrossSampleRule: TypeAlias = Callable[[OpCall], Any]

_CROSS_SAMPLE: dict[OpOverload, CrossSampleRule] = {}


def decomposes(*ops: OpOverload) -> Callable[[CrossSampleRule], CrossSampleRule]:
    """Register a function of an `OpCall` as the decomposition of ops; it may return NotImplemented."""

    def register(function: CrossSampleRule) -> CrossSampleRule:
        _CROSS_SAMPLE.update(dict.fromkeys(ops, function))
        return function

    return register


def cross_sample_table(batch: BatchSymbols) -> dict[Any, Callable[..., Any]]:
    """Return `{op: decomposition}` in the form that torch's joint export takes."""
    for family in _FAMILIES:
        importlib.import_module(f"fxdp.capture.cross_sample.{family}")
    return {op: _decomposition(op, function, batch) for op, function in _CROSS_SAMPLE.items()}


def _decomposition(op: OpOverload, function: CrossSampleRule, batch: BatchSymbols) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]

    def decompose(*args: Any, **kwargs: Any) -> Any:
        return function(OpCall(op, batch, {name: argument_of(op, name, args, kwargs) for name in names}))

    return decompose


def count(x: torch.Tensor, dims: Iterable[int]) -> Any:
    """Return the number of elements that a reduction over `dims` adds up: global, maybe symbolic."""
    product: Any = 1
    for dim in dims:
        product = product * x.shape[dim]
    return product


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to accumulate in: eager kernels accumulate half precision in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
