"""Sizes as expressions in `B`, the global batch: which dims carry the batch, and how often.

A dim may be sharded only if its size is `c * B` with `c` free of `B` ("homogeneous"); `B - 1` and
`B * B` in one dim never. All answers are cached: sympy would otherwise dominate the analysis.
"""

from __future__ import annotations

from functools import lru_cache

import sympy

from fxdp.ir.placements import Dim

B: sympy.Symbol = sympy.Symbol("B", integer=True, positive=True)
"""The global batch: the sum of all ranks' local batches."""

LOCAL: sympy.Symbol = sympy.Symbol("b", integer=True, nonnegative=True)
"""This rank's local batch."""

OFFSET: sympy.Symbol = sympy.Symbol("offset", integer=True, nonnegative=True)
"""The number of samples on the ranks before this one."""


def named_size(name: str) -> sympy.Symbol:
    """The symbol of a further dynamic size (`s0`, ...), or one of those above by its name."""
    return next((s for s in (B, LOCAL, OFFSET) if s.name == name), None) or sympy.Symbol(
        name, integer=True, positive=True
    )


@lru_cache(maxsize=65536)
def batch_factor(size: Dim) -> Dim | None:
    """The `c` of `size == c * B`, or None where the size is no such multiple of the batch."""
    if isinstance(size, int) or B not in size.free_symbols:
        return None
    quotient = sympy.cancel(size / B)
    if B in quotient.free_symbols or not quotient.is_integer:
        return None
    return int(quotient) if quotient.is_Integer else quotient


@lru_cache(maxsize=65536)
def mentions_batch(size: Dim) -> bool:
    """Whether the size depends on the batch at all (also as `B - 1` or `B * B`)."""
    return not isinstance(size, int) and B in size.free_symbols


@lru_cache(maxsize=65536)
def product(*sizes: Dim) -> Dim:
    """The product of sizes; an int where it is one."""
    value = sympy.Integer(1)
    for size in sizes:
        value = value * size
    return int(value) if value.is_Integer else value


@lru_cache(maxsize=65536)
def exact_quotient(a: Dim, b: Dim) -> Dim | None:
    """`a / b` where it is an integer (expression), else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = sympy.cancel(sympy.sympify(a) / b)
    if not quotient.is_integer:
        return None
    return int(quotient) if quotient.is_Integer else quotient


@lru_cache(maxsize=65536)
def hint(size: Dim, batch: int = 64) -> int:
    """A typical value of the size, for cost estimates: `B` counts `batch`, other symbols 32."""
    if isinstance(size, int):
        return size
    values = {s: batch if s == B else 32 for s in size.free_symbols}
    return int(size.xreplace({s: sympy.Integer(v) for s, v in values.items()}))


@lru_cache(maxsize=65536)
def local_size(size: Dim) -> Dim:
    """The rank's size of a sharded dim of the global `size`: `c * B` becomes `c * b`."""
    factor = batch_factor(size)
    if factor is None:
        raise ValueError(f"{size} is no multiple of the batch")
    return product(factor, LOCAL)
