"""softmax, cumsum, sort, flip, roll, glu, ...: the named dim entire (softmax may have parts), others free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from tests.rules.harness import T, check, listed, shown

aten = torch.ops.aten
X, CUBE = T("B", 4), T("B", 3, 3)
F64 = torch.float64
ONE, LINEAR = "S(0) -> S(0)", "S(0) -> S(0); P -> P"
TWO = "S(0) -> S(0), S(0)"
GRADIENT = "S(0), S(0) -> S(0); P, R -> P"

CASES: list[tuple[OpOverload, tuple[Any, ...], str]] = [
    (aten._softmax.default, (X, -1, False), ONE),
    (aten._log_softmax.default, (X, 1, False), ONE),
    (aten._safe_softmax.default, (X, 1), ONE),
    (aten._softmax_backward_data.default, (X, X, 1, F64), GRADIENT),
    (aten._log_softmax_backward_data.default, (X, X, -1, F64), GRADIENT),
    (aten.cumsum.default, (X, 1), LINEAR),
    (aten.cumprod.default, (X, 1), ONE),
    (aten.logcumsumexp.default, (X, 1), ONE),
    (aten._logcumsumexp.default, (X, 1), ONE),
    (aten.cummax.default, (X, 1), TWO),
    (aten.cummin.default, (X, 1), TWO),
    (aten.sort.default, (X,), TWO),
    (aten.topk.default, (X, 2), TWO),
    (aten.glu.default, (X,), ONE),
    (aten.glu_backward.default, (T("B", 2), X, -1), GRADIENT),
    (aten.flip.default, (CUBE, [1, -1]), LINEAR),
    (aten.roll.default, (CUBE, [1, 2], [1, -1]), LINEAR),
    (aten.rot90.default, (CUBE, 1, [1, 2]), LINEAR),
    (aten.renorm.default, (X, 2, 0, 0.5), ONE),
]


@pytest.mark.parametrize(("target", "args", "expected"), CASES, ids=shown)
def test_along_another_dim(target: OpOverload, args: tuple[Any, ...], expected: str) -> None:
    assert check(target, *args) == listed(expected)


def test_stable_sort() -> None:
    assert check(aten.sort.stable, X, stable=True, dim=1) == listed(TWO)


def test_a_cumulative_sum_that_rounds_keeps_no_sums() -> None:
    assert check(aten.cumsum.default, X, 1, dtype=torch.int64) == listed(ONE)
    assert check(aten.cumsum.default, T("B", 4, dtype=torch.int64), 1, dtype=F64) == listed(ONE)


Y = T(3, "2*B")
NONE, LINEAR_ONLY = "", "P -> P"
IN_PARTS = "S(1) -> S(1); S(1, 2) -> S(1, 2)"
GRADIENT_IN_PARTS = "P, R -> P; S(1), S(1) -> S(1); S(1, 2), S(1, 2) -> S(1, 2)"


def half_infinite(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One column of -inf alone, one with some."""
    value = torch.randn(shape, generator=generator, dtype=F64)
    value[:, 0] = float("-inf")
    value[: shape[0] // 2, 1] = float("-inf")
    return value


OVER_THE_BATCH: list[tuple[OpOverload, tuple[Any, ...], str]] = [
    (aten._softmax.default, (Y, 1, False), IN_PARTS),
    (aten._log_softmax.default, (Y, 1, False), IN_PARTS),
    (aten._safe_softmax.default, (T("B", 3, fill=half_infinite), 0), "S(0) -> S(0)"),
    (aten._softmax_backward_data.default, (Y, Y, 1, F64), GRADIENT_IN_PARTS),
    (aten._log_softmax_backward_data.default, (Y, Y, 1, F64), GRADIENT_IN_PARTS),
    (aten.cumsum.default, (Y, -1), LINEAR_ONLY),
    (aten.cummax.default, (Y, 1), NONE),
    (aten.sort.default, (Y,), NONE),
    (aten.topk.default, (Y, 2), NONE),
    (aten.glu.default, (Y,), NONE),
    (aten.flip.default, (Y, [0, 1]), LINEAR_ONLY),
    (aten.roll.default, (Y, [1], [1]), LINEAR_ONLY),
    (aten.roll.default, (Y, [1]), LINEAR_ONLY),  # over all dims as one
    (aten.rot90.default, (Y,), LINEAR_ONLY),
    (aten.renorm.default, (Y, 2, 0, 0.5), NONE),
]


@pytest.mark.parametrize(("target", "args", "expected"), OVER_THE_BATCH, ids=shown)
def test_along_the_batch(target: OpOverload, args: tuple[Any, ...], expected: str) -> None:
    assert check(target, *args, splits=((3, 1, 0, 2), (2, 2))) == listed(expected)


def test_blocks_of_another_dim_pass() -> None:
    assert check(aten._softmax.default, Y, 0, False) == listed("S(1) -> S(1); S(1, 2) -> S(1, 2)")
