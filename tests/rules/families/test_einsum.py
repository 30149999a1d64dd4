"""Products of matrices and vectors on virtual ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.rules.harness import T, check, shown

aten = torch.ops.aten
INT8: dict[str, Any] = {"dtype": torch.int8, "low": -3, "high": 3}

CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any], set[str]]] = [
    (aten.mm.default, (T("B", 3), T(3, 4)), {}, {"S(0), R -> S(0)", "P(sum), R -> P(sum)"}),
    (aten.mm.default, (T(3, "2*B"), T("2*B", 4)), {}, {"S(1), S(0) -> P(sum)", "S(1, 2), S(0, 2) -> P(sum)"}),
    (aten.mm.default, (T("B", 3), T(3, "B")), {}, {"S(0), R -> S(0)", "R, S(1) -> S(1)"}),
    (aten.mm.default, (T("2*B", 3), T(3, 4)), {}, {"S(0, 2), R -> S(0, 2)"}),
    (aten._int_mm.default, (T("B", 16, **INT8), T(16, 8, **INT8)), {}, {"S(0), R -> S(0)"}),
    (aten.bmm.default, (T("B", 2, 3), T("B", 3, 2)), {}, {"S(0), S(0) -> S(0)"}),
    (aten.bmm.default, (T(4, 2, "B"), T(4, "B", 2)), {}, {"S(2), S(1) -> P(sum)"}),
    (aten.mv.default, (T("B", 3), T(3)), {}, {"S(0), R -> S(0)", "R, P(sum) -> P(sum)"}),
    (aten.mv.default, (T(3, "B"), T("B")), {}, {"S(1), S(0) -> P(sum)"}),
    (aten.dot.default, (T("B"), T("B")), {}, {"S(0), S(0) -> P(sum)"}),
    (
        aten.vdot.default,
        (T("B", dtype=torch.complex128), T("B", dtype=torch.complex128)),
        {},
        {"S(0), S(0) -> P(sum)", "P(sum), R -> P(sum)"},
    ),
    (aten.ger.default, (T("B"), T(3)), {}, {"S(0), R -> S(0)", "R, P(sum) -> P(sum)"}),
    (
        aten.addmm.default,
        (T(4), T("B", 3), T(3, 4)),
        {},
        {"R, S(0), R -> S(0)", "P(sum), R, P(sum) -> P(sum)"},
    ),
    (aten.addmm.default, (T("B", 1), T("B", 3), T(3, 4)), {}, {"S(0), S(0), R -> S(0)"}),
    (
        aten.addmm.default,
        (T(3, 4), T(3, "B"), T("B", 4)),
        {"beta": 2.0, "alpha": 0.5},
        {"P(sum), S(1), S(0) -> P(sum)", "P(sum), P(sum), R -> P(sum)"},
    ),
    (aten.addmm.default, (T(1, 4), T("B", 3), T(3, 4)), {"beta": 0}, {"R, S(0), R -> S(0)"}),
    (
        aten.baddbmm.default,
        (T("B", 1, 4), T("B", 2, 3), T("B", 3, 4)),
        {"beta": 3.0},
        {"S(0), S(0), S(0) -> S(0)"},
    ),
    (aten.baddbmm.default, (T(1, 2, 4), T("B", 2, 3), T("B", 3, 4)), {}, {"R, S(0), S(0) -> S(0)"}),
    (
        aten.addbmm.default,
        (T(2, 4), T("B", 2, 3), T("B", 3, 4)),
        {},
        {"P(sum), S(0), S(0) -> P(sum)"},
    ),
    (aten.addmv.default, (T("B"), T("B", 3), T(3)), {}, {"S(0), S(0), R -> S(0)"}),
    (aten.addmv.default, (T(3), T(3, "B"), T("B")), {}, {"P(sum), S(1), S(0) -> P(sum)"}),
    (aten.addmm.default, (T(4), T(3, "B"), T("B", 4)), {}, {"P(sum), S(1), S(0) -> P(sum)"}),
    (
        aten.baddbmm.default,
        (T(1, 4), T(2, 3, "B"), T(2, "B", 4)),
        {"beta": 0.5},
        {"P(sum), S(2), S(1) -> P(sum)"},
    ),
    (aten.addr.default, (T("B", 3), T("B"), T(3)), {}, {"S(0), S(0), R -> S(0)"}),
    (aten._addmm_activation.default, (T(4), T("B", 3), T(3, 4)), {}, {"R, S(0), R -> S(0)"}),
    (
        aten.linear.default,
        (T(2, "B", 3), T(4, 3), T(4)),
        {},
        {"S(1), R, R -> S(1)", "R, P(sum), P(sum) -> P(sum)"},
    ),
    (aten.linear.default, (T("B", 3), T(4, 3)), {}, {"S(0), R -> S(0)"}),
    (
        aten._trilinear.default,
        (T("B", 3), T(4, 3, 2), T("B", 2), [1, 3], [0], [1, 2], [2, 3]),
        {},
        {"S(0), R, S(0) -> S(0)", "R, P(sum), R -> P(sum)"},
    ),
    (
        aten._cdist_forward.default,
        (T(2, "B", 3), T(1, 5, 3), 1.0, None),
        {},
        {"S(1), R -> S(1)"},
    ),
    (aten._cdist_forward.default, (T("B", 3), T("B", 3), 2.0, 2), {}, {"S(0), R -> S(0)", "R, S(0) -> S(1)"}),
    (
        aten._cdist_backward.default,
        (T("B", 5), T("B", 3), T(5, 3), 2.0, T("B", 5, low=1, high=2)),
        {},
        {"S(0), S(0), R, S(0) -> S(0)"},
    ),
    (
        aten._cdist_backward.default,
        (T(5, "B"), T(5, 3), T("B", 3), 1.0, T(5, "B", low=1, high=2)),
        {},
        {"S(1), R, S(0), S(1) -> P(sum)", "P(sum), R, R, R -> P(sum)"},
    ),
    (
        aten._cdist_backward.default,
        (T("B", 5, "B"), T("B", 5, 3), T("B", 3), 1.0, T("B", 5, "B", low=1, high=2)),
        {},
        {"S(0), S(0), R, S(0) -> S(0)", "S(2), R, S(0), S(2) -> P(sum)"},
    ),
]


@pytest.mark.parametrize(("target", "args", "kwargs", "expected"), CASES, ids=shown)
def test_product(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: set[str]) -> None:
    assert check(target, *args, **kwargs) >= expected


def test_the_contracted_dim_of_an_activated_product_stays_whole() -> None:
    assert check(aten._addmm_activation.default, T(4), T(2, "B"), T("B", 4)) == frozenset()


def test_a_broadcast_bias_of_a_matrix_vector_product_stays_whole() -> None:
    assert check(aten.addmv.default, T(1), T("B", 3), T(3)) == frozenset()
    assert check(aten.addmv.default, T(1), T(3, "B"), T("B")) == frozenset()


def test_the_gradient_of_distances_without_batch_dims_of_its_own_stays_whole() -> None:
    far = T("B", "B", 5, low=1, high=2)
    assert check(aten._cdist_backward.default, far, T("B", 3), T("B", 5, 3), 1.0, far) == {
        "P(sum), R, R, R -> P(sum)"
    }


def test_distances_whose_formula_depends_on_the_row_count_stay_whole() -> None:
    target = aten._cdist_forward.default
    assert check(target, T("B", 3), T("B", 3), 2.0, None) == frozenset()
    assert check(target, T("B", 3), T(26, 3), 2.0, None) == {"S(0), R -> S(0)"}
    assert check(target, T("B", 2, 3), T("B", 4, 3), 2.0, None) == {"S(0), S(0) -> S(0)"}
