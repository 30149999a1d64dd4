"""Rules for batched linear algebra and Fourier transforms.

Law: the dims before a matrix count independent problems, so they may be sharded; every result, be it a
matrix, a vector or a number per problem, begins with these dims. A transform mixes only the given dims, and
is linear.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.empty_parts import local_op
from fxdp.ir.ops.library import aten, existing
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import R
from fxdp.rules.labels import by_labels, letters, linear, trailing
from fxdp.rules.registry import Alternative, Op, rule


@rule(
    "linear algebra",
    aten.linalg_inv_ex.default, aten._linalg_det.default, aten._linalg_slogdet.default,
    aten.linalg_cholesky_ex.default, *existing("cholesky"), aten.cholesky_inverse.default,
    aten.linalg_qr.default, aten.geqrf.default, aten._linalg_svd.default, aten._linalg_eigh.default,
    aten.linalg_eig.default, aten._linalg_eigvals.default, aten.linalg_lu.default,
    aten.linalg_lu_factor_ex.default, aten.linalg_ldl_factor_ex.default, aten.linalg_matrix_exp.default,
)  # fmt: skip
def _of_one_matrix(op: Op) -> Iterator[Alternative]:
    """Yield shards of the leading dims, for factorisations, inverses, determinants and spectra."""
    (matrix,) = op.operands
    labels = letters(matrix.ndim - 2) + "..."
    yield from by_labels(op, [(matrix, labels)], labels)


@rule(
    "linear algebra",
    aten._linalg_solve_ex.default, aten.linalg_solve_triangular.default, aten.triangular_solve.default,
    aten.cholesky_solve.default, aten.linalg_lu_solve.default, aten.linalg_ldl_solve.default,
    aten.linalg_householder_product.default, aten.ormqr.default, aten.lu_unpack.default,
    *existing("_cholesky_solve_helper", "linalg_lstsq"),
)  # fmt: skip
def _of_equal_batches(op: Op) -> Iterator[Alternative]:
    """Yield shards of equal leading dims, without broadcast, for solvers and products of factors."""
    lead_ndim = op.operands[0].ndim - 2
    shape = op.operands[0].shape[:lead_ndim]
    if any(o.ndim < lead_ndim or o.shape[:lead_ndim] != shape for o in op.operands):
        return
    labels = letters(lead_ndim) + "..."
    # results that were not requested are empty
    outputs = [labels if t and t.shape[:lead_ndim] == shape else R for t in op.outputs]
    yield from by_labels(op, [(o, labels) for o in op.operands], outputs)


@rule("linear algebra", *existing("linalg_pinv.atol_rtol_tensor"))
def _pseudo_inverse(op: Op) -> Iterator[Alternative]:
    """Yield shards of the leading dims, for pseudo-inverses; tolerances broadcast against these dims."""
    matrix, *tolerances = op.operands
    lead = letters(matrix.ndim - 2)
    inputs = [(matrix, lead + "..."), *((t, trailing(lead, t.ndim)) for t in tolerances)]
    yield from by_labels(op, inputs, lead + "...", broadcast=True)


@rule("linear algebra", aten.linalg_cross.default)
def _cross_product(op: Op) -> Iterator[Alternative]:
    """Yield shards of all dims except the vectors' `dim`, for the cross product; operands broadcast."""
    a, b = op.operands
    names = letters(a.ndim, full={op.arg("dim") % a.ndim})
    inputs = [(a, names), (b, trailing(names, b.ndim))]
    yield from by_labels(op, inputs, names, broadcast=True)


@rule("fourier", aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
def _transform(op: Op) -> Iterator[Alternative]:
    """Yield shards of all dims except `dim`, for real or complex transforms over `dim`."""
    (x,) = op.operands
    names = letters(x.ndim, full={d % x.ndim for d in op.arg("dim")})
    # MKL refuses empty parts, although a transform of no rows is empty
    rewrite = Rewrite(target=local_op(op.target))
    yield from by_labels(op, [(x, names)], [names], rewrite=rewrite)
    yield from linear(op, [x])
