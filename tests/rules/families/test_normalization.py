"""Normalization and BatchNorm by running statistics on virtual ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxdp.ir.ops.moments import MOMENTS_OP
from fxdp.ir.types.placements import Dim
from fxdp.ir.types.sizes import B
from fxdp.ir.types.value_types import TensorType
from fxdp.rules.registry import Op, Operand, registry
from tests.rules.harness import T, check, shown, spelled

aten = torch.ops.aten
ALL = [True, True, True]
FULL: tuple[Dim, ...] = (B, 3, 4)


def positive(*shape: Any) -> T:
    return T(*shape, low=0.5, high=2.0)


CASES: list[tuple[Any, tuple[Any, ...], set[str]]] = [
    (
        aten.native_layer_norm.default,
        (T("B", 3, 4), [4], T(4), T(4), 1e-5),
        {"S(0), R, R -> S(0), S(0), S(0)"},
    ),
    (
        aten.native_layer_norm.default,
        (T(3, "2*B", 4), [4], None, None, 1e-5),
        {"S(1, 2) -> S(1, 2), S(1, 2), S(1, 2)"},
    ),
    (
        aten.native_layer_norm_backward.default,
        (T("B", 3, 4), T("B", 3, 4), [4], T("B", 3, 1), positive("B", 3, 1), T(4), T(4), ALL),
        {"S(0), S(0), S(0), S(0), R, R -> S(0), P(sum), P(sum)"},
    ),
    (
        aten.native_layer_norm_backward.default,
        (
            T("B", 3, 4),
            T("B", 3, 4),
            [3, 4],
            T("B", 1, 1),
            positive("B", 1, 1),
            T(3, 4),
            None,
            [False, True, False],
        ),
        {"S(0), S(0), S(0), S(0), R -> -, P(sum), -"},
    ),
    (aten._fused_rms_norm.default, (T("B", 3, 4), [4], T(4), 1e-5), {"S(0), R -> S(0), S(0)"}),
    (
        aten.native_group_norm.default,
        (T("B", 4, 3, 3), T(4), T(4), "B", 4, 9, 2, 1e-5),
        {"S(0), R, R -> S(0), S(0), S(0)"},
    ),
    (
        aten.native_group_norm.default,
        (T("2*B", 4, 3), None, None, "2*B", 4, 3, 2, 1e-5),
        {"S(0, 2) -> S(0, 2), S(0, 2), S(0, 2)"},
    ),
    (
        aten.native_group_norm_backward.default,
        (T("B", 4, 9), T("B", 4, 9), T("B", 2), positive("B", 2), T(4), "B", 4, 9, 2, ALL),
        {"S(0), S(0), S(0), S(0), R -> S(0), P(sum), P(sum)"},
    ),
    (
        aten._native_batch_norm_legit_no_training.default,
        (T("B", 4, 3), T(4), T(4), T(4), positive(4), 0.1, 1e-5),
        {"S(0), R, R, R, R -> S(0), R, R"},
    ),
    (
        aten.native_batch_norm.default,
        (T(3, 4, "B"), T(4), T(4), T(4), positive(4), False, 0.1, 1e-5),
        {"S(2), R, R, R, R -> S(2), R, R"},
    ),
    (
        aten._native_batch_norm_legit_functional.default,
        (T("B", 4), None, None, T(4), positive(4), False, 0.1, 1e-5),
        {"S(0), R, R -> S(0), R, R, R, R"},
    ),
    (
        aten._batch_norm_no_update.default,
        (T("B", 4), None, None, T(4), positive(4), 0.1, 1e-5),
        {"S(0), R, R -> S(0), R, R, R"},
    ),
    (
        aten.native_batch_norm_backward.default,
        (T("B", 4, 3), T("B", 4, 3), T(4), T(4), positive(4), T(0), T(0), False, 1e-5, ALL),
        {"S(0), S(0), R, R, R, *, * -> S(0), P(sum), P(sum)"},
    ),
    (
        aten.native_batch_norm_backward.default,
        (T("B", 4), T("B", 4), T(4), T(4), positive(4), None, None, False, 1e-5, [True, False, True]),
        {"S(0), S(0), R, R, R -> S(0), -, P(sum)"},
    ),
    (MOMENTS_OP, (T("B", 4, 3), [0, 2]), {"S(0) -> P(moments)"}),
    (MOMENTS_OP, (T(3, 4, "2*B"), [0, 2]), {"S(2) -> P(moments)", "S(2, 2) -> P(moments)"}),
    (MOMENTS_OP, (T(3, "2*B", 4), [0, 2]), {"S(1) -> S(1)", "S(1, 2) -> S(1, 2)"}),
    (MOMENTS_OP, (T(3, 4, "B"), [0]), {"S(2) -> S(2)"}),
]


@pytest.mark.parametrize(("target", "args", "expected"), CASES, ids=shown)
def test_normalization(target: Any, args: tuple[Any, ...], expected: set[str]) -> None:
    assert check(target, *args) >= expected


def test_rms_norm_backward() -> None:
    """CUDA only: the structure of the alternative."""
    target = aten._fused_rms_norm_backward.default
    grad, x, rstd = (Operand(i, TensorType(torch.float32, s)) for i, s in enumerate([FULL, FULL, (B, 3, 1)]))
    weight = Operand(3, TensorType(torch.float32, (4,)))
    args = (grad, x, (4,), rstd, weight, (True, True))
    op = Op(target, args, (), (grad, x, rstd, weight), (grad.type, weight.type))
    assert [spelled(a) for a in registry[target].rule(op)] == ["S(0), S(0), S(0), R -> S(0), P(sum)"]


def test_batch_statistics_couple_samples() -> None:
    statistics = (T(4), positive(4))
    training = (T("B", 4), None, None, *statistics, True, 0.1, 1e-5)
    assert check(aten.native_batch_norm.default, *training) == frozenset()
    assert check(aten._native_batch_norm_legit_functional.default, *training) == frozenset()
    backward = (T("B", 4), T("B", 4), None, *statistics, T(4), positive(4), True, 1e-5, ALL)
    assert check(aten.native_batch_norm_backward.default, *backward) == frozenset()


def test_weight_norm() -> None:
    assert check(aten._weight_norm_interface.default, T(4, 3), T(4, 1), 0) == frozenset()
    operands = (T(4, 3), T(4, 3), T(4, 1), positive(4, 1))
    found = check(aten._weight_norm_interface_backward.default, *operands, 0)
    assert found == {"P(sum), R, R, R -> P(sum), P(sum)"}


def test_a_normalized_batch_dim_needs_all_of_it() -> None:
    assert check(aten.native_layer_norm.default, T(3, "B"), ["B"], None, None, 1e-5) == frozenset()
