"""Factories, `*_like` and `new_*`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from tests.rules.harness import T, check, listed, shown

aten = torch.ops.aten
X = T("B", 3)

CASES: list[tuple[OpOverload, tuple[Any, ...], str]] = [
    (aten.full.default, (["B", "B+1", "2*B"], 1.0), " -> S(0);  -> S(2)"),
    (aten.full.default, ([3], 1.0), ""),
    (aten.zeros.default, ([2, "B"],), "-> S(1)"),
    (aten.ones.default, (["B"],), "-> S(0)"),
    (aten.new_zeros.default, (X, ["B", 2]), "* -> R; * -> S(0)"),
    (aten.new_ones.default, (X, [2]), "* -> R"),
    (aten.new_full.default, (X, [2, "B"], 3.0), "* -> R; * -> S(1)"),
    (aten.new_zeros.default, (T("2*B", 1), ["2*B", 3]), "* -> R; * -> S(0); * -> S(0, 2)"),
    (aten.new_zeros.default, (T("2*B", 1), [3, "2*B"]), "* -> R; * -> S(1)"),
    (aten.zeros_like.default, (X,), "S(0) -> S(0); P -> R"),
    (aten.ones_like.default, (T("2*B"),), "S(0) -> S(0); S(0, 2) -> S(0, 2); P -> R"),
    (aten.full_like.default, (X, 2.0), "S(0) -> S(0); P -> R"),
    (aten.fill.Scalar, (X, 2.0), "S(0) -> S(0); P -> R"),
    (aten.zero.default, (X,), "S(0) -> S(0); P -> R"),
    (aten.arange.default, ("B",), ""),
    (aten.arange.start, ("B", "2*B"), ""),
    (aten.eye.default, ("B",), ""),
    (aten.scalar_tensor.default, ("B",), ""),
    (aten.linspace.default, (0, 1, "B"), ""),
    (aten.tril_indices.default, (3, 3), ""),
]


@pytest.mark.parametrize(("target", "args", "expected"), CASES, ids=shown)
def test_factories(target: OpOverload, args: tuple[Any, ...], expected: str) -> None:
    assert check(target, *args) == frozenset(f" {a}" if a.startswith("->") else a for a in listed(expected))


UNINITIALIZED: list[tuple[OpOverload, tuple[Any, ...], set[str]]] = [
    (aten.empty.memory_format, (["B", 3],), {" -> S(0)"}),
    (aten.empty_like.default, (X,), {"S(0) -> S(0)", "P(sum) -> R"}),
    (aten.new_empty.default, (X, ["B"]), {"* -> R", "* -> S(0)"}),
    (aten.empty_permuted.default, (["B", 3], [1, 0]), {" -> S(0)"}),
    (aten.empty_strided.default, (["B", 3], [3, 1]), {" -> S(0)"}),
    (aten.empty_strided.default, (["B", 3], [1, "B"]), set()),  # the stride is that of the full value
    (aten.new_empty_strided.default, (X, [3, "B"], ["B", 1]), {"* -> R"}),
]


@pytest.mark.parametrize(("target", "args", "expected"), UNINITIALIZED, ids=shown)
def test_uninitialized(target: OpOverload, args: tuple[Any, ...], expected: set[str]) -> None:
    assert check(target, *args, random=True) == expected


def test_a_fill_that_counts_the_batch_stays_global() -> None:
    assert check(aten.full.default, ["B"], "B*3") == {" -> S(0)"}
