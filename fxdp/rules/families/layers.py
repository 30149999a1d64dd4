"""Rules for entire layers as one op: fused recurrent cells (CUDA), transformer layers in evaluation, loops.

Law: dim 0 counts samples, which never interact: the rows of a cell's gates, the sequences that attend within
themselves. Weights are full, and a bias's gradient sums over samples. A mask with a sample dim is sharded
with the samples; a mask over positions only is full. An iteration of a loop over samples reads the rows of
one sample and shared values, whose gradients are sums over the iterations.

Entire recurrent layers (`mkldnn_rnn_layer`, `_cudnn_rnn`) run replicated: they pass an opaque workspace from
forward to backward that has no placement. Captured without these backends, such layers decompose into cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

from fxdp.ir.ops.library import aten, existing
from fxdp.ir.ops.sequential_sample_loop import LOOP_BACKWARD_OP, LOOP_OP
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
def _cell(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples, for gates and states.

    Vectors among the results are gradients of biases.
    """
    names = [a.name for a in op.target._schema.arguments if a.name in _PER_SAMPLE]
    outputs = ["n_" if t and len(t.shape) == 2 else "_" for t in op.outputs]
    yield from by_labels(op, [(op.arg(name), "n...") for name in names], outputs)


def _mask_labels(op: Op, samples: Operand) -> str | None:
    """Return the labels of the mask, or None if the meaning of its dims is unknown."""
    mask = op.arg("mask")
    if mask is None:
        return ""
    if mask.ndim == 2:
        return "n_" if op.arg("mask_type") == _BY_PADDING else "__"
    return "n..." if mask.shape[0] == samples.shape[0] else None


@rule("transformer", *existing("_transformer_encoder_layer_fwd"))
def _encoder_layer(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples, for attention and feed-forward of `[samples, positions, features]`."""
    x = op.arg("src")
    mask = _mask_labels(op, x)
    if x.ndim == 3 and mask is not None:
        yield from by_labels(op, [(x, "n__"), (op.arg("mask"), mask)], ["n__"])


@rule("transformer", *existing("_native_multi_head_attention"))
def _multi_head_attention(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples, for attention with projections.

    The attention weights, if requested, also have the samples first.
    """
    queries = [op.arg(n) for n in ("query", "key", "value")]
    mask = _mask_labels(op, queries[0])
    if mask is None or any(q.ndim != 3 for q in queries):
        return
    yield from by_labels(op, [*((q, "n__") for q in queries), (op.arg("mask"), mask)], "n...")


@rule("transformer", *existing("_transform_bias_rescale_qkv"))
def _split_heads(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples, for the split into query, key and value per head."""
    yield from by_labels(op, [(op.arg("qkv"), "n__")], "n___")


@rule("iterations", LOOP_OP)
def _iterations(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples, with one row of the result for each sample."""
    yield from by_labels(op, [(rows, "n...") for rows in op.arg("rows")], "n...")


@rule("iterations", LOOP_BACKWARD_OP, kind="contracted")
def _iterations_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples: the gradients of rows are sharded, of shared values partial."""
    rows, shared = op.arg("rows"), op.arg("shared")
    results = compress(["n..."] * len(rows) + ["..."] * len(shared), op.arg("wanted"))
    yield from by_labels(op, [(value, "n...") for value in (op.arg("grad"), *rows)], list(results))
