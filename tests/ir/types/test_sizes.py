from __future__ import annotations

from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from fxdp.ir.types.sizes import (
    LOCAL,
    B,
    batch_factor,
    evaluate,
    exact_quotient,
    hint,
    local_size,
    mentions_batch,
    number,
    product,
    rank_sizes,
)

S0 = sympy.Symbol("s0", integer=True, positive=True)


@pytest.mark.parametrize(
    ("size", "factor"),
    [
        (B, 1),
        (7 * B, 7),
        (B * S0, S0),
        (3 * B * S0, 3 * S0),
        (B * (S0 + 1), S0 + 1),
        (B * S0 + B, S0 + 1),
        (2 * (B * S0 + 3 * B), 2 * S0 + 6),
        (64, None),
        (S0, None),
        (B - 1, None),
        (B + 1, None),
        (B * B, None),
        (B / 2, None),
        (B * sympy.floor(S0 / 2), sympy.floor(S0 / 2)),
        (sympy.floor(B / 2), None),
    ],
)
def test_batch_factor(size: Any, factor: Any) -> None:
    found = batch_factor(size)
    assert found == factor or sympy.expand(found - factor) == 0  # type: ignore[operator]


def test_a_whole_factor_is_a_python_int() -> None:
    assert type(batch_factor(4 * B)) is int
    assert type(product(2, sympy.Integer(3))) is int
    assert type(exact_quotient(6 * S0, S0)) is int


@pytest.mark.parametrize(("size", "mentions"), [(3, False), (S0, False), (B - 1, True), (B * B, True)])
def test_mentions_batch(size: Any, mentions: bool) -> None:
    assert mentions_batch(size) is mentions


@pytest.mark.parametrize(
    ("a", "b", "quotient"),
    [(6, 3, 2), (7, 3, None), (6, 0, None), (6 * B, 3, 2 * B), (B, 2, None), (B * S0, S0, B), (S0, B, None)],
)
def test_exact_quotient(a: Any, b: Any, quotient: Any) -> None:
    assert exact_quotient(a, b) == quotient


def test_hints_are_typical_sizes() -> None:
    assert (hint(5), hint(3 * B), hint(B * S0), hint(B + 1, batch=8)) == (5, 192, 64 * 32, 9)


def test_local_size() -> None:
    assert local_size(B * S0 * 2) == 2 * S0 * LOCAL
    with pytest.raises(ValueError, match="no multiple of the batch"):
        local_size(B - 1)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 3), st.integers(-3, 3))
def test_only_homogeneous_sizes_have_a_factor(factor: int, power: int, plus: int) -> None:
    size = factor * B**power + plus
    size = int(size) if sympy.sympify(size).is_Integer else size
    assert batch_factor(size) == (factor if power == 1 and plus == 0 else None)


def test_sizes_have_values_by_the_names_of_their_symbols() -> None:
    values = {"B": 6, "s0": 5}
    assert [evaluate(n, values) for n in (7, 3 * B, B * S0 + 1, sympy.floor(B / 4))] == [7, 18, 31, 1]
    with pytest.raises(KeyError, match="s0"):
        evaluate(B * S0, {"B": 6})
    assert evaluate(B * S0, {"B": 6}, unknown=2) == 12


def test_a_number_is_the_one_that_eager_code_would_have() -> None:
    found = [number(n, {"B": 6, "s0": 4}) for n in (B * S0, B / S0, sympy.Ge(B, S0), sympy.Integer(2))]
    assert found == [24, 1.5, True, 2]
    assert list(map(type, found)) == [int, float, bool, int]
    assert (number(B / 2, {"B": 3.0}), number(B / 2, {"B": 3})) == (1.5, 1.5)


def test_sizes_of_a_rank() -> None:
    assert [rank_sizes((2, 0, 3), rank) for rank in range(3)] == [
        {"B": 5, "b": 2, "offset": 0},
        {"B": 5, "b": 0, "offset": 2},
        {"B": 5, "b": 3, "offset": 2},
    ]
