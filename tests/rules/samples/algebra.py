"""Batched linear algebra and Fourier transforms."""

from __future__ import annotations

from typing import Any

import torch

from fxdp.ir.types.placements import Dim
from fxdp.rules.proof.samples import Sample as T
from tests.rules.samples.draw import Call, Draw, Maker, call

C128 = torch.complex128


def spd(*shape: Dim | str) -> T:
    """Positive definite matrices, each its own."""

    def fill(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        root = torch.randn(size, dtype=torch.float64, generator=generator)
        return root @ root.mT + 2 * torch.eye(size[-1], dtype=torch.float64)

    return T(*shape, fill=fill)


def factor(*shape: Dim | str, upper: bool = False) -> T:
    """Well-conditioned triangles."""

    def fill(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        full = torch.rand(size, dtype=torch.float64, generator=generator) + 2 * torch.eye(size[-1])
        return full.triu() if upper else full.tril()

    return T(*shape, fill=fill)


def pivots(*shape: Dim | str) -> T:
    """No rows exchanged."""
    return T(*shape, dtype=torch.int32, fill=lambda size, _: torch.arange(1, size[-1] + 1).expand(size))


def _lead(g: Draw) -> list[Dim]:
    return [g.n(label) for label in g.dims(1, 2)]


def _spd(*rest: Any, **kwargs: Any) -> Maker:
    return lambda g: call(spd(*_lead(g), 3, 3), *rest, **kwargs)


def _solve(g: Draw) -> Call:
    lead = _lead(g)
    return call(spd(*lead, 3, 3), g.one([T(*lead, 3, 2), T(*lead, 3)]))


def _factored(g: Draw) -> Call:
    lead = _lead(g)
    return call(factor(*lead, 3, 3), pivots(*lead, 3), T(*lead, 3, 2))


def _triangular(g: Draw) -> Call:
    lead = _lead(g)
    return call(T(*lead, 3, 2), factor(*lead, 3, 3, upper=True))


def _cholesky_solve(g: Draw) -> Call:
    lead = _lead(g)
    return call(T(*lead, 3, 2), factor(*lead, 3, 3))


def _reflectors(g: Draw, applied: bool) -> Call:
    lead = _lead(g)
    return call(T(*lead, 3, 3), T(*lead, 3), *([T(*lead, 3, 2)] if applied else []))


def _lstsq(g: Draw) -> Call:
    lead = _lead(g)
    return call(spd(*lead, 3, 3), T(*lead, 3, 2), driver="gelsd")


def _pinv(g: Draw) -> Call:
    return call(spd(*_lead(g), 3, 3), rtol=T(low=1e-12, high=1e-11))


def _cross(g: Draw) -> Call:
    a, b = g.one([("N3", "13"), ("N3", "N3"), ("aN3", "1N3")])
    return call(g.t(a), g.t(b), dim=-1)


def _transform(g: Draw, *rest: Any, **options: Any) -> Call:
    dims = g.dims(2, 3)
    return call(g.t(dims, **options), [g.one(range(len(dims)))], 0, *rest)


SAMPLES: dict[str, Maker] = {
    **dict.fromkeys(
        (
            "linalg_inv_ex", "_linalg_det", "_linalg_slogdet", "linalg_cholesky_ex", "cholesky", "linalg_qr",
            "geqrf", "_linalg_eigh", "linalg_eig", "_linalg_eigvals", "linalg_lu", "linalg_lu_factor_ex",
            "linalg_ldl_factor_ex", "linalg_matrix_exp",
        ),
        _spd(),
    ),
    "cholesky_inverse": lambda g: call(factor(*_lead(g), 3, 3)),
    "_linalg_svd": lambda g: call(T(*_lead(g), 3, 4)),
    "_linalg_solve_ex": _solve,
    "linalg_solve_triangular": lambda g: (
        lambda lead: call(factor(*lead, 3, 3, upper=True), T(*lead, 3, 2), upper=True)
    )(_lead(g)),
    "triangular_solve": _triangular,
    "cholesky_solve": _cholesky_solve,
    "_cholesky_solve_helper": lambda g: call(*_cholesky_solve(g).args, False),
    "linalg_lu_solve": _factored,
    "linalg_ldl_solve": _factored,
    "linalg_householder_product": lambda g: _reflectors(g, False),
    "ormqr": lambda g: _reflectors(g, True),
    "lu_unpack": lambda g: call(*_factored(g).args[:2]),
    "linalg_lstsq": _lstsq,
    "linalg_pinv.atol_rtol_tensor": _pinv,
    "linalg_cross": _cross,
    "_fft_c2c": lambda g: _transform(g, g.flag(), dtype=C128),
    "_fft_r2c": lambda g: call(g.t("3N4"), [g.one([0, 2])], 0, g.flag()),
    "_fft_c2r": lambda g: call(g.t("aN3", dtype=C128), [2], 0, 4),
}  # fmt: skip
