"""Fused cells of recurrent networks (CUDA).

Law: the rows of the gates are samples, which never meet; the bias's gradient sums over them. Whole fused
layers (`mkldnn_rnn_layer`, `_cudnn_rnn`) run whole: they hand an opaque workspace from forward to
backward that has no placement. Captured without these backends they fall apart into cells.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.library import aten
from fxdp.rules.labels import by_labels, leading
from fxdp.rules.registry import Alternative, Op, rule

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
    inputs = [(o, leading("n", o.ndim)) for o in map(op.arg, names) if o is not None]
    yield from by_labels(op, inputs, [_result(len(t.shape)) if t else "" for t in op.outputs])


def _result(ndim: int) -> str:
    return "n_" if ndim == 2 else "_"
