"""`PackedSequence`: time-major over this rank's samples; the global one is so over all samples.

a a a     a b c a b a      by sample: a a a b b c     global: the samples of all ranks, sorted by length,
b b       batch_sizes      lengths: 3 2 1             packed anew; unpacked they are in the ranks' order
c         3 2 1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fxdp.capture.ragged_rows import Rows
from fxdp.eager.ragged.kinds.object_fields import Largest, ObjectFields
from fxdp.eager.tensor import GlobalTensor


def matches(value: Any) -> bool:
    """Return whether a value is a packed sequence."""
    return isinstance(value, PackedSequence)


def fields(value: PackedSequence) -> ObjectFields:
    """Return the steps of a packed sequence by sample, and the samples' lengths."""
    counts = value.batch_sizes
    samples = int(counts[0]) if len(counts) else 0
    order = value.unsorted_indices
    order = torch.arange(samples) if order is None else order.cpu()
    lengths = (counts[:, None] > torch.arange(samples)).sum(0)[order]
    steps = value.data.index_select(0, _time_major(lengths).argsort().to(value.data.device))
    described: list[tuple[str, Any, Rows | Largest | None]] = [
        ("data", steps, Rows("steps")),
        ("lengths", lengths.to(value.data.device), Rows("samples", lengths="steps")),
    ]
    return ObjectFields(described, lambda given: _packed(*given))


def _packed(steps: Tensor, lengths: Tensor) -> PackedSequence:
    """Return samples that lie one after another as a packed sequence."""
    known = (lengths.full() if isinstance(lengths, GlobalTensor) else lengths).cpu()
    device = steps.device
    order = _by_length(known)
    counts = (known[:, None] > torch.arange(int(known.max()) if len(known) else 0)).sum(0)
    data = steps.index_select(0, _time_major(known).to(device))
    return PackedSequence(data, counts, order.to(device), order.argsort().to(device))


def _by_length(lengths: Tensor) -> Tensor:
    return lengths.sort(descending=True, stable=True).indices


def _time_major(lengths: Tensor) -> Tensor:
    """Return for each packed step its place among the samples' steps, one sample after another."""
    order = _by_length(lengths)
    starts = (lengths.cumsum(0) - lengths)[order]
    times = torch.arange(int(lengths.max()) if len(lengths) else 0)
    return (times[:, None] + starts)[times[:, None] < lengths[order]]
