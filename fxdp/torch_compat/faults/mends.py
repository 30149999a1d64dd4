"""Faults of torch that fxdp works around.

A workaround may not outlive its fault: `tests/torch_compat/faults/test_mends.py` shows each by a tiny
program of plain torch, and fails when a release fixes a fault, and when a new release still has one.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mend", "mends"]


@dataclass(frozen=True)
class Mend:
    """A fault of torch, and the file of fxdp that works around it."""

    name: str
    where: str
    """The file of fxdp with the workaround."""
    releases: tuple[str, ...]
    """The releases of torch that have the fault."""
    fault: str
    """Description of the fault in one sentence."""


def mends() -> tuple[Mend, ...]:
    """Return all workarounds, sorted by name."""
    return _MENDS


_ALL = ("2.11", "2.12", "2.13", "2.14", "2.15")
_MENDS = (
    Mend("attention_of_nothing", "ir/ops/empty_parts.py", _ALL,
         "attention between no rows ends the process"),
    Mend("attention_sums", "torch_compat/faults/attention_sums.py", _ALL[:2],
         "fake attention in float64 has log-sum-exps of float32, so its gradient stops"),
    Mend("average_pool", "lowering/inductor/decomposition_overrides.py", _ALL,
         "Inductor's gradient of an average pool with ceil_mode is too small"),
    Mend("convolution_strides", "torch_compat/faults/convolution_strides.py", _ALL,
         "fake convolutions of a number of images that the data decides are contiguous"),
    Mend("counted_masks", "torch_compat/faults/counted_masks.py", _ALL,
         "masks that became one have several counts, which Inductor refuses"),
    Mend("dtensor_fills", "torch_compat/dtensor_ops.py", _ALL[:4],
         "a column of a sharded tensor cannot be set to a number"),
    Mend("dtensor_kinds", "torch_compat/dtensor_ops.py", _ALL[:1],
         "a subclass of DTensor is not asked for its ops"),
    Mend("dtensor_means", "torch_compat/dtensor_ops.py", _ALL,
         "a mean loss of uneven shards is the mean of the ranks' means"),
    Mend("dtensor_no_rows", "torch_compat/dtensor_ops.py", _ALL,
         "the maximum of a sharded tensor raises on a rank without rows, others wait"),
    Mend("dtensor_numbers", "torch_compat/dtensor_ops.py", _ALL,
         "a number that is read of a sharded tensor is this rank's part of it"),
    Mend("dtensor_views", "torch_compat/dtensor_ops.py", _ALL,
         "rows that are selected of a sharded tensor are a copy: writes are lost"),
    Mend("fourier_of_nothing", "ir/ops/empty_parts.py", _ALL[:4],
         "MKL refuses Fourier transforms of empty tensors"),
    Mend("gradients_on_meta", "torch_compat/exporting.py", _ALL,
         "no gradient passes some ops on the meta device"),
    Mend("kept_order", "torch_compat/faults/kept_order.py", _ALL[2:3],
         "Inductor reads a buffer before all is written into it: gradients are silently wrong"),
    Mend("lstm_dropout", "capture/export/rewrites.py", _ALL,
         "the decomposition of several recurrent layers leaves out the dropout between them"),
    Mend("lstm_states", "torch_compat/faults/lstm_states.py", _ALL[:2],
         "the decomposition of an LSTM gives its states a dim too many"),
    Mend("margins_of_nothing", "ir/ops/empty_parts.py", _ALL,
         "summed margin losses of no samples are whatever was in memory"),
    Mend("multilabel_margin", "capture/patches/patch_tables.py", _ALL[:3],
         "the decomposition of this loss counts targets after the first -1"),
    Mend("no_images", "lowering/inductor/decomposition_overrides.py", _ALL,
         "Inductor's backward of a convolution of an empty batch stops"),
    Mend("norm_of_nothing", "ir/ops/empty_parts.py", _ALL,
         "the backward of BatchNorm in evaluation ends the process if there are no samples"),
    Mend("open_strides", "torch_compat/faults/open_strides.py", _ALL,
         "views ask what a stride equals that the data decides"),
    Mend("pixels_of_nothing", "ir/ops/empty_parts.py", _ALL,
         "pixel_unshuffle of an empty tensor keeps its shape"),
    Mend("replaced_sizes", "capture/patches/patch_tables.py", _ALL,
         "an export fails where the bound of a size, a float, exceeds the largest integer"),
    Mend("select_scatter", "capture/python/each_sample.py", _ALL,
         "no gradient of a row passes select_scatter under vmap"),
    Mend("selected_offsets", "torch_compat/faults/selected_offsets.py", _ALL,
         "sizes in the offset of a selected row are written as no Python"),
)  # fmt: skip
