"""Fits of an expression in `B` to a number that differs between static traces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy

from fxdp.ir.types.sizes import B
from fxdp.torch_compat import as_float, binary_logarithm, float_power, true_quotient

_DEGREE = 2
_MAX_DENOMINATOR = 10**6
_LARGEST_LOGARITHM = 35  # larger exponentials have no fraction with such a denominator


def fit_int(batches: Sequence[int], values: Sequence[int]) -> sympy.Expr | None:
    """Return the polynomial in `B` of degree at most 2 with these integer values; None if there is none."""
    return _polynomial(tuple(batches), tuple(Fraction(value) for value in values))


def fit_float(batches: Sequence[int], values: Sequence[float]) -> sympy.Expr | None:
    """Fit `p(B)`, `1 / p(B)`, `p(B) / B`, or a root or logarithm, as in `2 / (B - 1)` or `B ** 0.5`.

    A quotient is written as Python's division of two integers, which a rank computes exactly like eager code.
    None if no expression yields these floats exactly.
    """
    if not all(map(math.isfinite, values)):
        return None
    for form in (_rational, _root, _logarithm):
        found = form(batches, values)
        if found is not None:
            return found if _agree(found, batches, values) else None
    return None


def fit_number(batches: Sequence[int], values: Sequence[Any]) -> sympy.Expr | None:
    """Fit numbers that are all of one type, int or float; None if no expression yields them."""
    fits: dict[type, Callable[..., sympy.Expr | None]] = {int: fit_int, float: fit_float}
    fit = fits.get(type(values[0])) if len({type(value) for value in values}) == 1 else None
    return None if fit is None else fit(batches, values)


def _root(batches: Sequence[int], values: Sequence[float]) -> sympy.Expr | None:
    """Fit the square root of a quotient."""
    if not all(value > 0 for value in values):
        return None
    square = _rational(batches, [value * value for value in values])
    return None if square is None else float_power(square, 0.5)


def _logarithm(batches: Sequence[int], values: Sequence[float]) -> sympy.Expr | None:
    """Fit the natural logarithm of a quotient, or a logarithm of `B` to any base."""
    if max(map(abs, values)) < _LARGEST_LOGARITHM:
        inside = _rational(batches, [math.exp(value) for value in values])
        if inside is not None:  # torch has only the binary logarithm of sizes
            return sympy.Float(math.log(2)) * binary_logarithm(inside)
    scales = [value / math.log2(batch) for value, batch in zip(values, batches, strict=True)]
    if not all(math.isclose(scale, scales[0], rel_tol=4e-16) for scale in scales):
        return None
    return sympy.Float(scales[0]) * binary_logarithm(as_float(B))


def _rational(batches: Sequence[int], values: Sequence[float]) -> sympy.Expr | None:
    """Fit `p(B)`, `p(B) / B` or `1 / p(B)` to floats, up to rounding."""
    direct = _polynomial(tuple(batches), _fractions(values))
    if direct is not None:
        return _quotient(direct, sympy.Integer(1))
    shared = _polynomial(
        tuple(batches), _fractions([value * batch for value, batch in zip(values, batches, strict=True)])
    )
    if shared is not None:
        return _quotient(shared, B)
    if not all(values):
        return None
    inverse = _polynomial(tuple(batches), _fractions([1 / value for value in values]))
    return None if inverse is None else _quotient(sympy.Integer(1), inverse)


def _quotient(above: sympy.Expr, below: sympy.Expr) -> sympy.Expr:
    """Return the quotient of two polynomials as a float; coefficients may be fractions."""
    numerator, denominator = sympy.together(above / below).as_numer_denom()
    if denominator == 1:
        return as_float(sympy.expand(numerator))
    return true_quotient(sympy.expand(numerator), sympy.expand(denominator))


def _fractions(values: Sequence[float]) -> tuple[Fraction, ...]:
    return tuple(Fraction(value).limit_denominator(_MAX_DENOMINATOR) for value in values)


def _agree(expr: sympy.Expr, batches: Sequence[int], values: Sequence[float]) -> bool:
    pairs = zip(batches, values, strict=True)
    return all(
        math.isclose(float(expr.xreplace({B: sympy.Integer(batch)})), value, rel_tol=4e-16)
        for batch, value in pairs
    )


@lru_cache(maxsize=65536)
def _polynomial(batches: tuple[int, ...], values: tuple[Fraction, ...]) -> sympy.Expr | None:
    """Return the Newton interpolation; None if points beyond the degree are not on the polynomial."""
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
