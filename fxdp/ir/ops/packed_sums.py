"""A sum over ranks of several values at once, which are laid end to end where the others read them.

    cat of a, b     10 MiB written     start_sum of a, b    10 MiB written to where the sum is made
    all_reduce      10 MiB copied
                    5 MiB copied to shared memory

For code that runs op by op: Inductor writes what it packs where it belongs, and sums in place, by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxdp.ir.ops.library import opaque
from fxdp.torch_compat import start_sum as _start_sum


def _shape(values: Sequence[Tensor], group: str) -> Tensor:
    return torch.cat(list(values))


start_sum = opaque("start_sum(Tensor[] values, str group) -> Tensor", _start_sum, _shape)
"""Start summing values over the ranks of a group; what is waited for are the sums, as `cat` puts them."""
torch.fx.node.has_side_effect(start_sum)
