"""Flags of the batch that the user's Python code branches on: whether any or all of its values are so.

    if not padding.any():           one program for batches without padding, another one for those with some
        padding = None

    if torch.rand(1) > 0: ...       true but for one number of many millions

A program goes one way, and gives the flag of the global batch as a result; a call that finds it to be another
runs the program of the other way (`fxdp/module/other_ways.py`). Only what `any` and `all` say is such a flag,
and what is as good as sure: these are seldom others from step to step, while a comparison of sums
(`if x.sum() > 0`) may be another at each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxdp.capture.patches.patch import Patch, around

_MARK = "_fxdp_flag"


def mark(tensor: Tensor, likely: bool) -> Tensor:
    """Make a tensor of one truth a flag, which is likely to be so."""
    setattr(tensor, _MARK, likely)
    return tensor


def is_flag(tensor: Tensor) -> bool:
    """Whether it is what `any` or `all` said of a whole tensor, or was marked."""
    return hasattr(tensor, _MARK)


def likely(flag: Tensor) -> bool:
    """What a flag is taken for before the first call has said."""
    return bool(getattr(flag, _MARK))


def _marked(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made = plain(*args, **kwargs)
    if isinstance(made, Tensor) and made.dim() == 0 and made.dtype == torch.bool:
        mark(made, likely=False)
    return made


FLAGS = tuple(Patch(owner, name, around(_marked)) for owner in (Tensor, torch) for name in ("any", "all"))
"""While the user's code is traced."""
