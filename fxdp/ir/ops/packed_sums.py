"""A sum of several values over ranks, packed directly into the buffer of the transport.

    cat of a, b     10 MiB written     start_sum of a, b    10 MiB written to where the sum is made
    all_reduce      10 MiB copied
                    5 MiB copied to shared memory

Or of values that stay in place, where all ranks can read them:

    start_sums of a, b     nothing written
    finish_sums            a and b are the sums

For code that runs op by op: Inductor by itself writes packed values into place, and sums in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxdp.ir.ops.library import opaque
from fxdp.torch_compat import start_sum as _start_sum
from fxdp.torch_compat import start_sums as _start_sums


def _shape(values: Sequence[Tensor], group: str) -> Tensor:
    return torch.cat(list(values))


start_sum = opaque("start_sum(Tensor[] values, str group) -> Tensor", _start_sum, _shape)
"""Starts the sum of values over the ranks of a group; the wait returns the sums as `cat` would."""
torch.fx.node.has_side_effect(start_sum)


def _start_in_place(values: Sequence[Tensor], group: str) -> Tensor:
    begun = _start_sums(values, group)
    begun.summed = tuple(values)  # type: ignore[attr-defined]
    return begun


def _finish_in_place(begun: Tensor) -> list[Tensor]:
    return [*torch.ops._c10d_functional.wait_tensor(begun).summed]


start_sums = opaque(
    "start_sums(Tensor(a!)[] values, str group) -> Tensor", _start_in_place,
    lambda values, group: values[0].new_empty(0),
)  # fmt: skip
"""Starts the in-place sum of values of one dtype over the ranks of a group.

`finish_sums` returns the values.
"""
finish_sums = opaque("finish_sums(Tensor begun) -> Tensor[]", _finish_in_place, lambda begun: [])
"""Waits for `start_sums` and returns the given values, which now are the sums."""
torch.fx.node.has_side_effect(start_sums)
