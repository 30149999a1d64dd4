"""Ops that must read full values: they run replicated on every rank, for the reason above each group.

Registration records this decision; an op without any rule runs replicated too, but is reported as unknown.
Sizes that depend on values can only be known from the full value.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.library import existing
from fxdp.rules.labels import linear
from fxdp.rules.registry import Alternative, Op, rule, runs_replicated

# the size of the result depends on all values
runs_replicated(
    "size_by_value", "size by value",
    *existing(
        "nonzero_static", "bincount", "_unique", "_unique2", "unique_dim", "unique_consecutive",
        "unique_dim_consecutive", "_pack_padded_sequence",
    ),
)  # fmt: skip

# a sample's result depends on the previous samples, or on an extremum of all
runs_replicated(
    "order_of_values", "order of values",
    *existing(
        "masked_scatter", "_ctc_loss", "_ctc_loss.Tensor", "_ctc_loss_backward", "_ctc_loss_backward.Tensor",
        "_cudnn_ctc_loss", "_cudnn_ctc_loss.Tensor",
        "_histogramdd_bin_edges", "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors",
        "embedding_renorm", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate",
        "_fused_moving_avg_obs_fq_helper_functional",
    ),
)  # fmt: skip

# pairs `i < j` are enumerated: a rank's pairs are not contiguous in the result
runs_replicated("pairs", "order of values", *existing("_pdist_forward"))

# statistics of the global batch in one op; capture decomposes the ones that occur in models
runs_replicated(
    "batch_statistics", "batch statistics",
    *existing(
        "_native_batch_norm_legit.no_stats", "_batch_norm_with_update_functional", "batch_norm_backward",
        "cudnn_batch_norm_backward", "miopen_batch_norm", "miopen_batch_norm_backward",
        "batch_norm_stats", "batch_norm_elemt", "batch_norm_backward_reduce", "batch_norm_backward_elemt",
        "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "batch_norm_update_stats",
    ),
)  # fmt: skip

# a workspace that only the op's own backward can read has no placement
runs_replicated(
    "opaque_state", "opaque state",
    *existing(
        "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward",
        "_cudnn_rnn_flatten_weight", "miopen_rnn", "miopen_rnn_backward",
    ),
)  # fmt: skip

# scales have a layout in blocks of several rows
runs_replicated(
    "opaque_scales", "opaque scales",
    *existing(
        "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2",
        "_scaled_dot_product_flash_attention.quantized", "_flash_attention_forward.quantized",
    ),
)  # fmt: skip

# a number for the host, or an assertion: all ranks must read equal values
runs_replicated(
    "checks", "checks",
    *existing(
        "_local_scalar_dense", "_assert_async", "_assert_async.msg", "_functional_assert_async.msg",
        "_assert_scalar", "_functional_assert_scalar",
    ),
)  # fmt: skip


@rule("order of values", *existing("masked_scatter_backward", "_pdist_backward"), kind="gathered")
def _gradient_by_order(op: Op) -> Iterator[Alternative]:
    """Yield partial gradients only: these backwards are linear in the incoming gradient."""
    yield from linear(op, op.operands[:1])


@rule("checks", *existing("_assert_tensor_metadata"))
def _checks_of_metadata(op: Op) -> Iterator[Alternative]:
    """Yield any placement for a check of the dtype; sizes and strides are those of the full value."""
    if op.arg("size") is None and op.arg("stride") is None:
        yield op.alternative({o.index: None for o in op.operands})
