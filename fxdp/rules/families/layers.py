"""Entire layers as one op: fused recurrent cells (CUDA) and transformer layers in evaluation.

Law: dim 0 counts samples, which never meet: the rows of a cell's gates, the sequences that attend within
themselves. Weights are full, and a bias's gradient sums over samples. A mask that counts samples too splits
with them, one over positions only is complete.

Entire recurrent layers (`mkldnn_rnn_layer`, `_cudnn_rnn`) run replicated: they hand an opaque workspace from
forward to backward that has no placement. Captured without these backends they fall apart into cells.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.library import aten, existing
from fxdp.rules.labels import by_labels
from fxdp.rules.registry import Alternative, Op, Operand, rule

_BY_PADDING = 1
"""The `mask_type` of a mask `[samples, positions]`."""

_PER_SAMPLE = frozenset({"input_gates", "hidden_gates", "cx", "cy", "hx", "grad_hy", "grad_cy", "workspace"})


@rule(
    "recurrent",
    aten._thnn_fused_lstm_cell_backward_impl.default, aten._thnn_fused_gru_cell_backward.default,
    kind="contracted",
)  # fmt: skip
@rule("recurrent", aten._thnn_fused_lstm_cell.default, aten._thnn_fused_gru_cell.default)
def cell(op: Op) -> Iterator[Alternative]:
    """Gates and states per sample; vectors among the results are gradients of biases."""
    names = [a.name for a in op.target._schema.arguments if a.name in _PER_SAMPLE]
    outputs = ["n_" if t and len(t.shape) == 2 else "_" for t in op.outputs]
    yield from by_labels(op, [(op.arg(name), "n...") for name in names], outputs)


def _mask_labels(op: Op, samples: Operand) -> str | None:
    """Labels of the mask, or None where it cannot be told what its dims are."""
    mask = op.arg("mask")
    if mask is None:
        return ""
    if mask.ndim == 2:
        return "n_" if op.arg("mask_type") == _BY_PADDING else "__"
    return "n..." if mask.shape[0] == samples.shape[0] else None


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
    yield from by_labels(op, [*((q, "n__") for q in queries), (op.arg("mask"), mask)], "n...")


@rule("transformer", *existing("_transform_bias_rescale_qkv"))
def split_heads(op: Op) -> Iterator[Alternative]:
    """Query, key and value per head."""
    yield from by_labels(op, [(op.arg("qkv"), "n__")], "n___")
