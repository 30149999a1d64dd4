"""Rules for products of matrices and vectors: sums of products over labelled dims.

Law: a multilinear form may be split along any label. A label of the result shards the result; a contracted
label gives a partial result. The form is linear in each factor, and a bias (`addend`) is added once.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.library import aten, existing
from fxdp.ir.types.placements import Dim
from fxdp.rules.labels import by_labels, letters, linear, trailing
from fxdp.rules.registry import Alternative, Op, rule

_EQUATIONS: dict[str, tuple[str, str, str]] = {
    "mm": ("mk", "kn", "mn"),
    "_int_mm": ("mk", "kn", "mn"),
    "bmm": ("bmk", "bkn", "bmn"),
    "mv": ("mk", "k", "m"),
    "dot": ("k", "k", ""),
    "vdot": ("k", "k", ""),
    "ger": ("m", "n", "mn"),
    "outer": ("m", "n", "mn"),
}
_BIASED: dict[str, tuple[str, str, str]] = {
    "addmm": ("mk", "kn", "mn"),
    "baddbmm": ("bmk", "bkn", "bmn"),
    "addbmm": ("bmk", "bkn", "mn"),
    "addmv": ("mk", "k", "m"),
    "addr": ("m", "n", "mn"),
}


@rule(
    "einsum",
    aten.mm.default, aten.mm.dtype, aten._int_mm.default, aten.bmm.default, aten.bmm.dtype,
    aten.mv.default, aten.dot.default, aten.vdot.default,
    kind="contracted",
)  # fmt: skip
@rule("einsum", aten.ger.default, aten.outer.default)
def _product_of_two(op: Op) -> Iterator[Alternative]:
    """Yield shards for `a @ b`: rows, columns, batches (sharded) or the contracted dim (partial)."""
    left, right, result = _EQUATIONS[op.target._schema.name.removeprefix("aten::")]
    a, b = op.operands
    yield from by_labels(op, [(a, left), (b, right)], [result])
    yield from linear(op, [a], [b])


@rule(
    "einsum",
    aten.addmm.default, aten.addmm.dtype, aten.baddbmm.default, aten.baddbmm.dtype, aten.addbmm.default,
    aten.addmv.default,
    kind="contracted",
)  # fmt: skip
@rule("einsum", aten.addr.default)
def _biased_product(op: Op) -> Iterator[Alternative]:
    """Yield shards for `beta * bias + alpha * a @ b`, like the product.

    Beside a partial product, the bias must be partial.
    """
    left, right, result = _BIASED[op.target._schema.name.removeprefix("aten::")]
    bias, a, b = op.operands
    if op.target is aten.addmv.default and bias.shape != op.output.shape:
        return  # for an empty matrix, torch's result has the bias's shape
    inputs = [(a, left), (b, right), (bias, trailing(result, bias.ndim))]
    # a full bias beside partial products would be added once per rank
    yield from by_labels(op, inputs, [result], broadcast=True, addends=[bias])
    yield from linear(op, [bias, a], [bias, b])


@rule("einsum", aten._addmm_activation.default)
def _activated_product(op: Op) -> Iterator[Alternative]:
    """Yield shards of rows and columns; under an activation the contracted dim must be unsharded."""
    bias, a, b = op.operands
    # relu(x + y) is not relu(x) + relu(y): terms of a sum must not reach the activation
    inputs = [(a, "m_"), (b, "_n"), (bias, trailing("mn", bias.ndim))]
    yield from by_labels(op, inputs, ["mn"], broadcast=True)


@rule("einsum", aten.linear.default, kind="contracted")
def _linear_layer(op: Op) -> Iterator[Alternative]:
    """Yield shards for `x @ w.T + bias` with any number of leading dims."""
    x, weight, *rest = op.operands
    rows = letters(x.ndim - 1)
    columns = "Z" if weight.ndim == 2 else ""
    inputs = [(x, rows + "K"), (weight, columns + "K"), *((b, trailing(columns, b.ndim)) for b in rest)]
    yield from by_labels(op, inputs, [rows + columns], addends=rest)
    yield from linear(op, [x, *rest], [weight, *rest])


@rule("einsum", aten._trilinear.default, kind="contracted")
def _trilinear(op: Op) -> Iterator[Alternative]:
    """Yield shards for `(a * b * c).sum(sumdim)`.

    Each operand lacks the dims in the corresponding `expand` list.
    """
    expands = [op.arg(f"expand{i}") for i in (1, 2, 3)]
    total = op.operands[0].ndim + len(expands[0])
    inputs = [
        (operand, letters(total, expand).replace("_", ""))
        for operand, expand in zip(op.operands, expands, strict=True)
    ]
    result = letters(total, op.arg("sumdim")).replace("_", "")
    yield from by_labels(op, inputs, [result], broadcast=True)
    yield from linear(op, *([o] for o in op.operands))


@rule("einsum", aten._cdist_forward.default)
def _distances(op: Op) -> Iterator[Alternative]:
    """Yield shards of batches and rows for pairwise distances, which are no plain sum over the feature dim.

    For `p == 2` torch chooses between two formulas by the row counts, unless `compute_mode` selects one. Rows
    are sharded only if a rank with few rows chooses the formula of the global batch.
    """
    a, b = op.operands
    free = op.arg("p") != 2 or op.arg("compute_mode") in (1, 2)
    # The formulas round differently: distances near zero, by more than verification allows. So rows of one
    # operand are sharded only where the second operand, full on every rank, decides alone.
    rows = "M" if free or _many(b.shape[-2]) else "_"
    columns = "N" if free or _many(a.shape[-2]) else "_"
    batch = letters(max(a.ndim, b.ndim) - 2)
    inputs = [(a, trailing(batch + rows + "_", a.ndim)), (b, trailing(batch + columns + "_", b.ndim))]
    yield from by_labels(op, inputs, [batch + rows + columns], broadcast=True)


def _many(rows: Dim) -> bool:
    """Return whether one operand's row count alone selects the formula by matrix product."""
    return isinstance(rows, int) and rows > 25


@rule("einsum", *existing("_euclidean_dist"))
def _euclidean_distances(op: Op) -> Iterator[Alternative]:
    """Yield shards of batches and rows for pairwise distances, always computed by matrix product."""
    a, b = op.operands
    batch = letters(a.ndim - 2)
    yield from by_labels(op, [(a, batch + "M_"), (b, batch + "N_")], [batch + "MN"])


@rule("einsum", aten._cdist_backward.default, kind="contracted")
def _distances_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards for the first operand's gradient of pairwise distances, which sums over the second's rows.

    The second operand may lack batch dims. If the first one does, torch gives the gradient of no rows the
    first operand's shape instead of the result's, so it must be full.
    """
    grad, a, b, distance = op.operands
    yield from linear(op, [grad])
    if a.shape != op.output.shape:
        return
    batch = letters(grad.ndim - 2)
    pairs = batch + "MN"
    sides = [(a, trailing(batch + "M_", a.ndim)), (b, trailing(batch + "N_", b.ndim))]
    yield from by_labels(op, [(grad, pairs), *sides, (distance, pairs)], [batch + "M_"], broadcast=True)
