"""Fitting a number that differs between static traces as an expression in `B`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import sympy

from fxdp.symbols import B

_DEGREE = 2
_MAX_DENOMINATOR = 10**6


def fit_int(batches: Sequence[int], values: Sequence[int]) -> sympy.Expr | None:
    """A polynomial of degree at most 2 in `B` that gives these integers; None if there is none."""
    return _polynomial(tuple(batches), tuple(Fraction(value) for value in values))


def fit_float(batches: Sequence[int], values: Sequence[float]) -> sympy.Expr | None:
    """`p(B)` or `1 / p(B)`, as of `2 / (B - 1)`; None if neither gives these floats exactly."""
    if not all(math.isfinite(value) and value != 0 for value in values):
        return None
    for direct in (True, False):
        wanted = [value if direct else 1 / value for value in values]
        exact = tuple(Fraction(value).limit_denominator(_MAX_DENOMINATOR) for value in wanted)
        found = _polynomial(tuple(batches), exact)
        if found is None:
            continue
        expr = found if direct else 1 / found
        if all(_agrees(expr, batch, value) for batch, value in zip(batches, values, strict=True)):
            return expr
    return None


def _agrees(expr: sympy.Expr, batch: int, value: float) -> bool:
    return math.isclose(float(expr.xreplace({B: sympy.Integer(batch)})), value, rel_tol=4e-16)


@lru_cache(maxsize=65536)
def _polynomial(batches: tuple[int, ...], values: tuple[Fraction, ...]) -> sympy.Expr | None:
    """Newton interpolation; the points beyond the degree must lie on the polynomial."""
    differences = list(values)
    coefficients = [differences[0]]
    for order in range(1, len(batches)):
        differences = [
            (right - left) / (batches[i + order] - batches[i])
            for i, (left, right) in enumerate(itertools.pairwise(differences))
        ]
        coefficients.append(differences[0])
    if any(coefficients[_DEGREE + 1 :]):
        return None
    expr: sympy.Expr = sympy.Integer(0)
    basis: sympy.Expr = sympy.Integer(1)
    for coefficient, batch in zip(coefficients[: _DEGREE + 1], batches, strict=False):
        expr += sympy.Rational(coefficient.numerator, coefficient.denominator) * basis
        basis *= B - batch
    return sympy.expand(expr)
