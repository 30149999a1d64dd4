"""Pad inputs whose sizes differ between ranks to the largest rank's sizes, or raise on all ranks.

A batch is the concatenation of the ranks' parts, so all sizes except the batch dim must be equal. A rank
without samples takes the sizes of the ranks with samples, as there is nothing to pad. Sequences of different
lengths are padded at the end to the longest rank's length, with the value that `pad=` gives for the input.
Without a pad value the call is refused, because only the model defines the meaning of padding; a batch of
text with an attention mask has known values (`fxdp/module/calls/text_padding.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from fxdp.capture.batch_dims import LEFT_OUT, spread_prefix
from fxdp.capture.inputs import Inputs
from fxdp.errors import InputError
from fxdp.ranks.liveness.failure import everywhere

_Dims: TypeAlias = "tuple[tuple[int, ...], ...]"
"""For each tensor the sizes of all dims except the batch dim."""

_Row: TypeAlias = "tuple[tuple[int, ...], _Dims]"
"""How many rows each of a rank's tensors has, and their remaining sizes."""


def spread_pad(pad: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float | None]:
    """Return the pad value of each tensor in `(args, kwargs)`; None for a tensor that must not be padded.

    `pad` is one number for all, or a pytree prefix of `(args, kwargs)`; a dict may omit keys.

    Raises
    ------
    InputError : the prefix does not fit the inputs.
    """
    rows = spread_prefix(pad, (args, kwargs), "pad", (int, float), "a number")
    return [None if value is LEFT_OUT else value for _, value, _ in rows]


def common_lengths(
    rows: Sequence[_Row], paths: Sequence[str], batch_dims: Sequence[int | None], pads: Sequence[float | None]
) -> _Dims:
    """Return the common sizes of all ranks' inputs; `rows` holds a row for each rank.

    Raises
    ------
    InputError : on every rank: sizes differ in an input without a pad value, or without a batch dim.
    """
    wanted, faults = [], []
    for i, batch_dim in enumerate(batch_dims):
        # a rank without rows has nothing to pad, and takes the sizes of ranks with rows
        sizes = [dims[i] for counts, dims in rows if counts[i] > 0 or batch_dim is None]
        sizes = sizes or [dims[i] for _, dims in rows]
        largest = tuple(map(max, zip(*sizes, strict=True)))
        if len(set(sizes)) > 1 and (pads[i] is None or batch_dim is None):
            listed = ", ".join(f"{list(dims[i])} on rank {rank}" for rank, (_, dims) in enumerate(rows))
            faults.append(f"{paths[i]} has sizes (without the batch) {listed}")
        wanted.append(largest)
    if faults:
        listing = "\n  ".join(faults)
        raise everywhere(
            InputError(
                f"the ranks' inputs differ in sizes other than the batch:\n  {listing}\n"
                "Pad them to one length before the call, or name pad values with pad= of fxdp.compile, as in "
                "pad=((0, -100), {}) for token ids and labels"
            )
        )
    return tuple(wanted)


def padded(
    inputs: Inputs, wanted: _Dims, pads: Sequence[float | None], at_start: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs padded to the wanted sizes, at the end or start; gradients flow back into them."""
    rows = zip(inputs.tensors, inputs.batch_dims, wanted, pads, strict=True)
    return inputs.rebuild(_grown(*row, at_start) for row in rows)


def _grown(
    tensor: Tensor, batch_dim: int | None, sizes: Sequence[int], value: float | None, at_start: bool
) -> Tensor:
    if batch_dim is None:
        return tensor
    shape = [*sizes[:batch_dim], tensor.shape[batch_dim], *sizes[batch_dim:]]
    if list(tensor.shape) == shape:
        return tensor
    if not tensor.shape[batch_dim]:
        return tensor.new_zeros(shape).requires_grad_(tensor.requires_grad)
    more = [wanted - size for wanted, size in zip(shape, tensor.shape, strict=True)]
    sides = [(n, 0) if at_start else (0, n) for n in reversed(more)]
    return F.pad(tensor, [n for side in sides for n in side], value=value)
