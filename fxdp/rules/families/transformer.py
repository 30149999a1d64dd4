"""Whole transformer layers as one op: what `nn.TransformerEncoderLayer` runs in evaluation.

Law: dim 0 counts samples, which attend only within themselves; weights are whole. A mask that counts samples
too splits with them, one over positions only is whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.rules.labels import by_labels, leading
from fxdp.rules.registry import Alternative, Op, Operand, existing, rule

_BY_PADDING = 1
"""The `mask_type` of a mask `[samples, positions]`."""


def _mask_labels(op: Op, samples: Operand) -> str | None:
    """Labels of the mask, or None where it cannot be told what its dims are."""
    mask = op.arg("mask")
    if mask is None:
        return ""
    if mask.ndim == 2:
        return "n_" if op.arg("mask_type") == _BY_PADDING else "__"
    return leading("n", mask.ndim) if mask.shape[0] == samples.shape[0] else None


@rule("transformer", *existing("_transformer_encoder_layer_fwd"))
def encoder_layer(op: Op) -> Iterator[Alternative]:
    """Attention and feed-forward with their norms, of `[samples, positions, features]`."""
    x = op.arg("src")
    mask = _mask_labels(op, x)
    if x.ndim == 3 and mask is not None:
        yield from by_labels(op, [(x, "n__"), (op.arg("mask"), mask)], ["n__"])


@rule("transformer", *existing("_native_multi_head_attention"))
def multi_head_attention(op: Op) -> Iterator[Alternative]:
    """Attention with its projections; the attention weights, if asked for, lead with samples too."""
    queries = [op.arg(n) for n in ("query", "key", "value")]
    mask = _mask_labels(op, queries[0])
    if mask is None or any(q.ndim != 3 for q in queries):
        return
    outputs = [leading("n", len(t.shape)) if t else "" for t in op.outputs]
    yield from by_labels(op, [*((q, "n__") for q in queries), (op.arg("mask"), mask)], outputs)


@rule("transformer", *existing("_transform_bias_rescale_qkv"))
def split_heads(op: Op) -> Iterator[Alternative]:
    """Query, key and value per head."""
    x = op.arg("qkv")
    yield from by_labels(op, [(x, "n__")], ["n___" for _ in op.outputs])
