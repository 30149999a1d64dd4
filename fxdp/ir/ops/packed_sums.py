"""A sum over ranks of several values at once, which are laid end to end where the others read them.

    cat of a, b     10 MiB written     start_sum of a, b    10 MiB written to where the sum is made
    all_reduce      10 MiB copied
                    5 MiB copied to shared memory

Or of values that stay where they are, which others read there:

    start_sums of a, b     nothing written
    finish_sums            a and b are the sums

For code that runs op by op: Inductor writes what it packs where it belongs, and sums in place, by itself.
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
"""Start summing values over the ranks of a group; what is waited for are the sums, as `cat` puts them."""
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
"""Start summing values of one dtype over the ranks of a group, in place; `finish_sums` hands them out."""
finish_sums = opaque("finish_sums(Tensor begun) -> Tensor[]", _finish_in_place, lambda begun: [])
"""The values that `start_sums` was given, when they are the sums."""
torch.fx.node.has_side_effect(start_sums)
