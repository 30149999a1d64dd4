"""Batched linear algebra on virtual ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxdp.ir.ops.library import existing
from tests.rules.harness import T, check, shown
from tests.rules.samples.algebra import factor, pivots, spd

aten = torch.ops.aten


A = spd("B", 3, 3)
ONE: list[tuple[Any, tuple[Any, ...], str]] = [
    (aten.linalg_inv_ex.default, (A,), "S(0), S(0)"),
    (aten._linalg_det.default, (A,), "S(0), S(0), S(0)"),
    (aten._linalg_slogdet.default, (A,), "S(0), S(0), S(0), S(0)"),
    (aten.linalg_cholesky_ex.default, (A,), "S(0), S(0)"),
    *((op, (A,), "S(0)") for op in existing("cholesky")),
    (aten.cholesky_inverse.default, (factor("B", 3, 3),), "S(0)"),
    (aten.linalg_qr.default, (A,), "S(0), S(0)"),
    (aten.geqrf.default, (A,), "S(0), S(0)"),
    (aten._linalg_svd.default, (T("B", 3, 4),), "S(0), S(0), S(0)"),
    (aten._linalg_eigh.default, (A,), "S(0), S(0)"),
    (aten.linalg_eig.default, (A,), "S(0), S(0)"),
    (aten._linalg_eigvals.default, (A,), "S(0)"),
    (aten.linalg_lu.default, (A,), "S(0), S(0), S(0)"),
    (aten.linalg_lu_factor_ex.default, (A,), "S(0), S(0), S(0)"),
    (aten.linalg_ldl_factor_ex.default, (A,), "S(0), S(0), S(0)"),
    (aten.linalg_matrix_exp.default, (T("B", 3, 3),), "S(0)"),
]


@pytest.mark.parametrize(("target", "args", "outputs"), ONE, ids=shown)
def test_of_one_matrix(target: Any, args: tuple[Any, ...], outputs: str) -> None:
    assert f"S(0) -> {outputs}" in check(target, *args)


SEVERAL: list[tuple[Any, tuple[Any, ...], str]] = [
    (aten._linalg_solve_ex.default, (A, T("B", 3, 2)), "S(0), S(0) -> S(0), S(0), S(0), S(0)"),
    (aten._linalg_solve_ex.default, (A, T("B", 3)), "S(0), S(0) -> S(0), S(0), S(0), S(0)"),
    (
        aten.triangular_solve.default,
        (T("B", 3, 2), factor("B", 3, 3, upper=True)),
        "S(0), S(0) -> S(0), S(0)",
    ),
    (aten.cholesky_solve.default, (T("B", 3, 2), factor("B", 3, 3)), "S(0), S(0) -> S(0)"),
    (
        aten.linalg_lu_solve.default,
        (factor("B", 3, 3), pivots("B", 3), T("B", 3, 2)),
        "S(0), S(0), S(0) -> S(0)",
    ),
    (
        aten.linalg_ldl_solve.default,
        (factor("B", 3, 3), pivots("B", 3), T("B", 3, 2)),
        "S(0), S(0), S(0) -> S(0)",
    ),
    (aten.linalg_householder_product.default, (T("B", 3, 3), T("B", 3)), "S(0), S(0) -> S(0)"),
    (aten.ormqr.default, (T("B", 3, 3), T("B", 3), T("B", 3, 2)), "S(0), S(0), S(0) -> S(0)"),
    (aten.lu_unpack.default, (factor("B", 3, 3), pivots("B", 3)), "S(0), S(0) -> S(0), S(0), S(0)"),
    (aten.linalg_cross.default, (T("B", 3), T(1, 3)), "S(0), R -> S(0)"),
]


@pytest.mark.parametrize(("target", "args", "expected"), SEVERAL, ids=shown)
def test_of_equal_batches(target: Any, args: tuple[Any, ...], expected: str) -> None:
    assert expected in check(target, *args)


def test_triangular() -> None:
    found = check(
        aten.linalg_solve_triangular.default, factor("B", 3, 3, upper=True), T("B", 3, 2), upper=True
    )
    assert "S(0), S(0) -> S(0)" in found


def test_a_broadcast_batch_stays_whole() -> None:
    target = aten.linalg_solve_triangular.default
    assert check(target, factor(1, 3, 3, upper=True), T("B", 3, 2), upper=True) == frozenset()
