"""Sizes as expressions in `B`, the global batch: which dims contain the batch as a factor.

A dim may be sharded only if its size is `c * B` with `c` free of `B` ("homogeneous"); `B - 1` and `B * B` in
one dim never. All answers are cached: sympy would otherwise dominate the analysis.

Values of symbols are given by name: `{"B": 64, "s0": 32}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import sympy

from fxdp.ir.types.placements import Dim

B: sympy.Symbol = sympy.Symbol("B", integer=True, positive=True)
"""The global batch: the sum of all ranks' local batches."""

LOCAL: sympy.Symbol = sympy.Symbol("b", integer=True, nonnegative=True)
"""This rank's local batch."""

OFFSET: sympy.Symbol = sympy.Symbol("offset", integer=True, nonnegative=True)
"""The number of samples on the ranks before this one."""


def named_size(name: str) -> sympy.Symbol:
    """Return the symbol of a further dynamic size (`s0`, ...), or `B`, `LOCAL` or `OFFSET` by name."""
    return next((s for s in (B, LOCAL, OFFSET) if s.name == name), None) or sympy.Symbol(
        name, integer=True, positive=True
    )


@lru_cache(maxsize=65536)
def batch_factor(size: Dim) -> Dim | None:
    """Return `c` of `size == c * B`, or None if the size is no multiple of the batch."""
    if isinstance(size, int) or B not in size.free_symbols:
        return None
    quotient = sympy.cancel(size / B)
    if B in quotient.free_symbols or not quotient.is_integer:
        return None
    return int(quotient) if quotient.is_Integer else quotient


@lru_cache(maxsize=65536)
def mentions_batch(size: Dim) -> bool:
    """Return whether the size depends on the batch at all (also as `B - 1` or `B * B`)."""
    return not isinstance(size, int) and B in size.free_symbols


@lru_cache(maxsize=65536)
def product(*sizes: Dim) -> Dim:
    """Return the product of sizes, as an int if possible."""
    value = sympy.Integer(1)
    for size in sizes:
        value = value * size
    return int(value) if value.is_Integer else value


@lru_cache(maxsize=65536)
def exact_quotient(a: Dim, b: Dim) -> Dim | None:
    """Return `a / b` if this is an integer (expression), else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = sympy.cancel(sympy.sympify(a) / b)
    if not quotient.is_integer:
        return None
    return int(quotient) if quotient.is_Integer else quotient


def evaluate(size: Dim, values: Mapping[str, int], *, unknown: int | None = None) -> int:
    """Return the value of a size.

    Parameters
    ----------
    values : the value of each symbol, by name.
    unknown : the value of symbols missing from `values`; None raises `KeyError` for these.
    """
    return size if isinstance(size, int) else int(number(size, values, unknown=unknown))


def number(expr: sympy.Basic, values: Mapping[str, Any], *, unknown: int | None = None) -> int | float | bool:
    """Return the value of any expression as a Python number; parameters as in `evaluate`."""
    found = [values[s.name] if unknown is None else values.get(s.name, unknown) for s in _symbols_of(expr)]
    return _substituted(expr, *found)


@lru_cache(maxsize=65536)
def _symbols_of(expr: sympy.Basic) -> tuple[sympy.Symbol, ...]:
    """Return the symbols of an expression, sorted by name."""
    return tuple(sorted(expr.free_symbols, key=str))


@lru_cache(maxsize=65536, typed=True)  # an expression with 1.0 differs from one with 1
def _substituted(expr: sympy.Basic, *numbers: Any) -> int | float | bool:
    value = expr.xreplace(dict(zip(_symbols_of(expr), map(sympy.sympify, numbers), strict=True)))
    if value.is_Boolean:
        return bool(value)
    return int(value) if value.is_Integer else float(value)


@lru_cache(maxsize=65536)
def hint(size: Dim, batch: int = 64) -> int:
    """Return a typical value of the size for cost estimates: `B` counts `batch`, each further symbol 32."""
    return evaluate(size, {B.name: batch}, unknown=32)


@lru_cache(maxsize=65536)
def fixed_by_data(size: Any) -> bool:
    """Return whether a size or number depends on tensor values: capture names these symbols `u0`, `u1`."""
    return isinstance(size, sympy.Basic) and any(str(symbol).startswith("u") for symbol in size.free_symbols)


def rank_sizes(split: Sequence[int], rank: int) -> dict[str, int]:
    """Return the values of `B`, `b` and `offset` on a rank, from the local batch size of each rank."""
    return {B.name: sum(split), LOCAL.name: split[rank], OFFSET.name: sum(split[:rank])}


@lru_cache(maxsize=65536)
def local_size(size: Dim) -> Dim:
    """Return the local size of a sharded dim of the global `size`: `c * B` becomes `c * b`."""
    factor = batch_factor(size)
    if factor is None:
        raise ValueError(f"{size} is no multiple of the batch")
    return product(factor, LOCAL)
