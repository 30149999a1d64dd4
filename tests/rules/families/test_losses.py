"""Losses on virtual ranks: per element, summed, and never averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxdp.ir.types.sizes import B
from tests.rules.harness import T, check, shown

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
UNIT: dict[str, Any] = {"low": 0.1, "high": 0.9}
ELEMENTWISE: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.mse_loss, ()),
    (aten.smooth_l1_loss, (0.5,)),
    (aten.huber_loss, (0.5,)),
    (aten.soft_margin_loss, ()),
]
BACKWARD: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.mse_loss_backward, ()),
    (aten.smooth_l1_loss_backward, (0.5,)),
    (aten.huber_loss_backward, (0.5,)),
    (aten.soft_margin_loss_backward, ()),
]


def classes(*shape: Any) -> T:
    return T(*shape, dtype=torch.int64, low=0, high=4)


@pytest.mark.parametrize(("op", "rest"), ELEMENTWISE, ids=shown)
def test_elementwise_loss(op: Any, rest: tuple[Any, ...]) -> None:
    pair = (T("B", 3), T("B", 3))
    assert "S(0), S(0) -> S(0)" in check(op.default, *pair, NONE, *rest)
    assert "S(0), S(0) -> P(sum)" in check(op.default, *pair, SUM, *rest)
    assert check(op.default, *pair, MEAN, *rest) == frozenset()


@pytest.mark.parametrize(("op", "rest"), BACKWARD, ids=shown)
def test_elementwise_loss_backward(op: Any, rest: tuple[Any, ...]) -> None:
    pair = (T("B", 3), T("B", 3))
    assert "S(0), S(0), S(0) -> S(0)" in check(op.default, T("B", 3), *pair, NONE, *rest)
    assert "R, S(0), S(0) -> S(0)" in check(op.default, T(), *pair, SUM, *rest)
    assert check(op.default, T(), *pair, MEAN, *rest) == frozenset()


def test_binary_cross_entropy() -> None:
    pair = (T("B", 3, **UNIT), T("B", 3, **UNIT))
    forward, backward = aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default
    assert "S(0), S(0), R -> S(0)" in check(forward, *pair, T(3), NONE)
    assert "S(0), S(0), S(0) -> P(sum)" in check(forward, *pair, T("B", 1), SUM)
    assert check(forward, *pair) == frozenset()  # the default is the mean
    assert "R, S(0), S(0), R -> S(0)" in check(backward, T(), *pair, T(3), SUM)
    logits = aten.binary_cross_entropy_with_logits.default
    assert "S(0), S(0), R, R -> P(sum)" in check(logits, *pair, T(3), T(3), SUM)


def test_nll_loss() -> None:
    op = aten.nll_loss_forward.default
    assert "S(0), S(0), R -> P(sum), P(sum)" in check(op, T("B", 4), classes("B"), T(4, **UNIT), SUM, 1)
    assert "S(0), S(0) -> S(0), R" in check(op, T("B", 4), classes("B"), None, NONE, -100)
    assert check(op, T("B", 4), classes("B"), None, MEAN, -100) == frozenset()
    planes = aten.nll_loss2d_forward.default
    assert "S(0), S(0) -> P(sum), P(sum)" in check(planes, T("B", 4, 2, 2), classes("B", 2, 2), None, SUM, 1)
    assert "S(0), S(0) -> S(0), R" in check(planes, T("B", 4, 2, 2), classes("B", 2, 2), None, NONE, 1)


@pytest.mark.parametrize("ignored", [-100, 1])
def test_nll_loss_of_classes_in_parts(ignored: int) -> None:
    """One class per sample, as contrastive losses have: each rank looks for its own classes."""
    flat = (T("B", "2*B"), T("B", dtype=torch.int64, low=0, high=B))
    planes = (T("B", "B", 2, 3), T("B", 2, 3, dtype=torch.int64, low=0, high=B))
    for (x, target), op, places in (
        (flat, aten.nll_loss_forward.default, ("S(1)", "S(1, 2)")),
        (planes, aten.nll_loss2d_forward.default, ("S(1)",)),
    ):
        for place in places:
            assert f"{place}, R -> P(sum), R" in check(op, x, target, None, SUM, ignored)
            assert f"{place}, R -> R, R" in check(op, x, target, None, NONE, ignored)


@pytest.mark.parametrize("ignored", [-100, 1])
def test_gradient_of_nll_loss_of_classes_in_parts(ignored: int) -> None:
    op = aten.nll_loss_backward.default
    flat = (T("B", "2*B"), T("B", dtype=torch.int64, low=0, high=B))
    for place in ("S(1)", "S(1, 2)"):
        assert f"R, *, R, * -> {place}" in check(op, T(), *flat, None, SUM, ignored, T())
        assert f"R, *, R, * -> {place}" in check(op, T("B"), *flat, None, NONE, ignored, T())
    back2d = aten.nll_loss2d_backward.default
    planes = (T("B", "B", 2, 3), T("B", 2, 3, dtype=torch.int64, low=0, high=B))
    assert "R, *, R, * -> S(1)" in check(back2d, T("B", 2, 3), *planes, None, NONE, ignored, T())


def test_nll_loss_backward() -> None:
    op = aten.nll_loss_backward.default
    rows = (T("B", 4), classes("B"))
    assert "R, S(0), S(0), R, * -> S(0)" in check(op, T(), *rows, T(4), SUM, 1, T())
    assert "S(0), S(0), S(0), * -> S(0)" in check(op, T("B"), *rows, None, NONE, 1, T())
    assert check(op, T(), *rows, None, MEAN, 1, T()) == frozenset()
    planes = aten.nll_loss2d_backward.default
    pixels = (T("B", 4, 2, 2), classes("B", 2, 2))
    assert "R, S(0), S(0), * -> S(0)" in check(planes, T(), *pixels, None, SUM, 1, T())
    assert "S(0), S(0), S(0), * -> S(0)" in check(planes, T("B", 2, 2), *pixels, None, NONE, 1, T())


def test_multi_margin_loss() -> None:
    op, backward = aten.multi_margin_loss.default, aten.multi_margin_loss_backward.default
    rows = (T("B", 4), classes("B"), 1, 1.0)
    assert "S(0), S(0), R -> P(sum)" in check(op, *rows, T(4), SUM)
    assert "S(0), S(0) -> S(0)" in check(op, *rows, None, NONE)
    assert "R, S(0), S(0), R -> S(0)" in check(backward, T(), *rows, T(4), SUM)
    assert "S(0), S(0), S(0) -> S(0)" in check(backward, T("B"), *rows, None, NONE)
    assert check(op, *rows, None, MEAN) == frozenset()


def test_multilabel_margin_loss() -> None:
    op, backward = aten.multilabel_margin_loss_forward.default, aten.multilabel_margin_loss_backward.default
    labels = T("B", 4, dtype=torch.int64, low=-1, high=4)
    assert "S(0), S(0) -> P(sum), S(0)" in check(op, T("B", 4), labels, SUM)
    assert "S(0), S(0) -> S(0), S(0)" in check(op, T("B", 4), labels, NONE)
    chosen = T("B", 4, fill=lambda size, _: torch.ones(size))
    found = check(backward, T(), T("B", 4), labels, SUM, chosen)
    assert "R, S(0), S(0), S(0) -> S(0)" in found
