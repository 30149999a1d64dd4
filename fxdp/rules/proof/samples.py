"""Sample tensors for any batch size: creation, splitting over ranks, and comparison of local values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from fxdp.ir.ops.collectives import sharded
from fxdp.ir.ops.parts import combine
from fxdp.ir.types.placements import Dim, Partial, Placement, Shard
from fxdp.ir.types.sizes import B, batch_factor, number, rank_sizes
from fxdp.ir.types.value_types import TensorType
from fxdp.rules.registry import Pointer

_TOLERANCE = 1e-9
_SIZE = re.compile(r"[-+*/() 0-9]*B[-+*/() 0-9B]*")


class Sample:
    """Tensor argument of a check: a shape in `B` (or strings like `"2*B"`), and how to fill the tensor.

    Numbers are uniform in `[low, high)` if these are given (bounds may count `B`), else normal; `fill` makes
    the value from the concrete shape and a generator. `iota=d` is `arange` along `d`, broadcast. With
    `selects`, the values select (or repeat) as many rows of a rank as the rank has samples. With `counts`,
    they are numbers of samples, one after the other.
    """

    def __init__(
        self, *shape: Dim | str, dtype: torch.dtype = torch.float64, low: Dim | float | None = None,
        high: Dim | float | None = None, iota: int | None = None,
        fill: Callable[[tuple[int, ...], torch.Generator], torch.Tensor] | None = None, selects: bool = False,
        counts: bool = False,
    ) -> None:  # fmt: skip
        self.shape: tuple[Dim, ...] = tuple(map(expression, shape))
        self.dtype, self.low, self.high, self.iota, self.fill = dtype, low, high, iota, fill
        self.selects = ("",) if selects else ()
        self.counts = "" if counts else None

    @property
    def pointer(self) -> Pointer | None:
        """The fact that rules know of row numbers of the batch."""
        if self.iota is None:
            return None
        return Pointer("", Shard(self.iota), batch_factor(self.shape[self.iota]) or 1)

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def make(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        """Return the tensor at a batch size."""
        shape = concrete(self.shape, batch)
        if self.fill is not None:
            return self.fill(shape, generator).to(self.dtype)
        if self.iota is not None:
            line = [-1 if d == self.iota else 1 for d in range(len(shape))]
            return torch.arange(shape[self.iota]).view(line).expand(shape).to(self.dtype).contiguous()
        low, high = (concrete(v, batch) for v in (self.low, self.high))
        return _random(shape, self.dtype, low, high, generator)


def expression(size: Any) -> Any:
    """Parse a size written as a string, like `"2*B"`; return anything else unchanged."""
    if not isinstance(size, str) or not _SIZE.fullmatch(size):
        return size
    value = sympy.sympify(size, locals={"B": B})
    return int(value) if value.is_Integer else value


class NoSizeError(ValueError):
    """Error: a result's size is no polynomial in the batch."""


def as_tuples(value: Any) -> Any:
    """Return arguments with tuples for lists, at any depth, so that they can be compared and hashed."""
    if isinstance(value, dict):
        return {name: as_tuples(one) for name, one in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, (tuple, list)) else value


def on_rank(leaf: Any, sizes: Mapping[str, int]) -> Any:
    """Return the number for an expression in `B`, `b` and `offset`; return anything else unchanged."""
    return number(leaf, sizes) if isinstance(leaf, sympy.Expr) else leaf


def concrete(sizes: Any, batch: int) -> Any:
    """Return sizes in `B` as numbers."""
    return pytree.tree_map(lambda n: on_rank(n, rank_sizes((batch,), 0)), sizes)


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, low: Any, high: Any, generator: torch.Generator
) -> torch.Tensor:
    """Return random numbers of a dtype: uniform in `[low, high)` if given, else normal (ints below 10)."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        bounds = (0 if low is None else low, 10 if high is None else high)
        return torch.randint(*bounds, shape, generator=generator).to(dtype)
    if low is None and high is None:
        return torch.randn(shape, dtype=dtype, generator=generator)
    start, end = (0.0 if low is None else low, 1.0 if high is None else high)
    return torch.rand(shape, dtype=dtype, generator=generator) * (end - start) + start


def split(value: torch.Tensor, placement: Placement, counts: Sequence[int]) -> list[torch.Tensor]:
    """Return each rank's local value of a global value."""
    if isinstance(placement, Partial):
        return _terms(value, len(counts))
    if not isinstance(placement, Shard):
        return [value.clone() for _ in counts]
    parts = sharded([value] * len(counts), counts, placement.dim, int(placement.outer))
    return [part.clone() for part in parts]


def _terms(value: torch.Tensor, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    low, high = (-5, 5) if value.dtype in (torch.int64, torch.int32) else (None, None)
    shape, dtype = tuple(value.shape), value.dtype
    terms = [_random(shape, dtype, low, high, generator) for _ in range(count - 1)]
    total = sum(terms[1:], terms[0]) if terms else torch.zeros_like(value)
    return [*terms, value ^ (total % 2 == 1) if dtype == torch.bool else value - total]


def assert_full(
    parts: Sequence[torch.Tensor],
    placement: Placement,
    expected: torch.Tensor,
    counts: Sequence[int],
    name: str,
) -> None:
    """Assert that the ranks' local values represent the global value under their placement."""
    if isinstance(placement, Partial):
        full = combine(list(parts), placement, counts).to(parts[0].dtype)
        _assert_equal(full, expected, f"{name} ({placement.op})")
    elif isinstance(placement, Shard):
        wanted = split(expected, placement, counts)
        for rank, (part, want) in enumerate(zip(parts, wanted, strict=True)):
            _assert_equal(part, want, f"{name} on rank {rank}")
    else:
        for rank, part in enumerate(parts):
            _assert_equal(part, expected, f"{name} on rank {rank}")


def _assert_equal(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    if got.dtype == want.dtype and got.equal(want):
        return
    torch.testing.assert_close(
        got, want, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


def fit_type(results: Sequence[Any], batches: Sequence[int]) -> TensorType | None:
    """Return the type of a result from its values at several batches; sizes are at most quadratic in `B`."""
    if not isinstance(results[0], torch.Tensor):
        return None
    shapes = [tuple(r.shape) for r in results]
    fitted = (_fit(sizes, tuple(batches)) for sizes in zip(*shapes, strict=True))
    return TensorType(results[0].dtype, tuple(fitted))


@cache
def _fit(sizes: tuple[int, ...], batches: tuple[int, ...]) -> Dim:
    if len(set(sizes)) == 1:
        return sizes[0]
    fitted = sympy.expand(sympy.interpolate(list(zip(batches, sizes, strict=True)), B))
    if sympy.degree(fitted, B) > 2:
        raise NoSizeError(f"{sizes} at batches {batches} is no size in B")
    return fitted
