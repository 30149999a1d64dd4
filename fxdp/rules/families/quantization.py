"""Rules for quantized arithmetic on floating-point values, and for products with packed weights.

Laws: fake quantization rounds each element separately, by a global scale or by the channel's scale; the
gradient of a learned scale sums over the elements with this scale. A product with packed weights treats rows
separately.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.library import existing
from fxdp.rules.labels import by_labels, letters
from fxdp.rules.registry import Alternative, Op, Operand, rule


def _elements(op: Op, x: Operand) -> str:
    """Return labels of all dims except channels with separate scales."""
    channels = {op.arg("axis") % x.ndim} if "per_channel" in op.target._schema.name else ()
    return letters(x.ndim, channels)


@rule(
    "quantization",
    *existing(
        "fake_quantize_per_tensor_affine_cachemask", "fake_quantize_per_channel_affine_cachemask",
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
        "_fake_quantize_learnable_per_tensor_affine", "_fake_quantize_learnable_per_channel_affine",
    ),
)  # fmt: skip
def _fake_quantize(op: Op) -> Iterator[Alternative]:
    """Yield shards for rounded values and, for some ops, a mask of the values in range."""
    x = op.arg("self")
    names = _elements(op, x)
    yield from by_labels(op, [(x, names)], names)


@rule(
    "quantization",
    *existing(
        "_fake_quantize_learnable_per_tensor_affine_backward",
        "_fake_quantize_learnable_per_channel_affine_backward",
    ),
    kind="contracted",
)
def _fake_quantize_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards: the gradient of the input is sharded, of scale and zero point partial."""
    grad, x = op.arg("grad"), op.arg("self")
    names = _elements(op, x)
    yield from by_labels(op, [(grad, names), (x, names)], [names, *("..." for _ in op.outputs[1:])])


@rule(
    "quantization",
    *existing(
        "_weight_int8pack_mm", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "_dyn_quant_matmul_4bit",
    ),
)  # fmt: skip
def _packed_product(op: Op) -> Iterator[Alternative]:
    """Yield shards of rows, for rows times packed weights; a quantized row has a separate scale."""
    yield from by_labels(op, [(op.operands[0], "m...")], "m...")


@rule("quantization", *existing("_scaled_mm"))
def _scaled_product(op: Op) -> Iterator[Alternative]:
    """Yield shards for `(a * scale_a) @ (b * scale_b) + bias` with one scale each, or one per row and column.

    The contracted dim stays unsharded, because partial sums would be rounded. Scales of blocks require full
    values.
    """
    a, b, scale_a, scale_b = (op.arg(n) for n in ("self", "mat2", "scale_a", "scale_b"))
    row = _scale_labels(scale_a, (a.shape[0], 1), "m_")
    column = _scale_labels(scale_b, (1, b.shape[1]), "_n")
    if row is None or column is None:
        return
    bias = op.arg("bias")
    inputs = [(a, "m_"), (b, "_n"), (scale_a, row), (scale_b, column), (bias, "n")]
    yield from by_labels(op, inputs, ["mn"])


def _scale_labels(scale: Operand, per_line: tuple[object, object], labels: str) -> str | None:
    if all(n == 1 for n in scale.shape):
        return "_" * scale.ndim
    return labels if scale.shape == per_line else None


@rule("quantization", *existing("_grouped_mm"), kind="contracted")
def _grouped_product(op: Op) -> Iterator[Alternative]:
    """Yield shards for one product per group.

    Groups of rows (or columns) end at `offs`, so that dim must be full.

        a [M, K], b [G, K, N] -> [M, N]     M in groups: K contracted, N splits
        a [G, M, K], b [G, K, N] -> [G, M, N]
        a [G, M, K], b [K, N] -> [M, N]     N in groups: K contracted, M splits
        a [M, K], b [K, N] -> [G, M, N]     K in groups: M and N split
    """
    a, b = op.arg("self"), op.arg("mat2")
    left, right, result = {
        (2, 3): ("_k", "_kn", "_n"),
        (3, 3): ("gmk", "gkn", "gmn"),
        (3, 2): ("_mk", "k_", "m_"),
        (2, 2): ("m_", "_n", "_mn"),
    }[a.ndim, b.ndim]
    if op.arg("bias") is None:
        yield from by_labels(op, [(a, left), (b, right)], [result])
