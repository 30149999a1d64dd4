"""Flags of the batch that the user's Python code branches on: whether any or all of its values are so.

    if not padding.any():           one program for batches without padding, another one for those with some
        padding = None

    if torch.rand(1) > 0: ...       true but for one number of many millions

    for i in hit.nonzero(): ...     a flag for each place of a short row whose length is fixed: a mixture's
                                    experts, most of which have tokens in most batches

A program goes one way, and gives the flag of the global batch as a result; a call that finds it to be another
runs the program of the other way (`fxdp/module/other_ways.py`). Only what `any` and `all` say is such a flag,
which places are found, and what is as good as sure: these are seldom others from step to step, while a
comparison of sums (`if x.sum() > 0`) may be another at each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fxdp.capture.patches.patch import Patch, around, calling_frame

_MARK = "_fxdp_flag"
_FOUND = "_fxdp_found"
_PLACES = 32
"""A longer row seldom has the same places in two batches."""


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


def _with_places(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made = plain(*args, **kwargs)
    of = args[0] if len(args) == 1 and not kwargs.get("as_tuple") else None
    if isinstance(of, Tensor) and of.dim() == 1 and isinstance(of.shape[0], int) and of.shape[0] <= _PLACES:
        setattr(made, _FOUND, of != 0)
    return made


def found_places(tensor: Tensor) -> Tensor | None:
    """Of the result of `nonzero` of a short row whose length is fixed: where that is not zero."""
    return getattr(tensor, _FOUND, None)


def rows_at(places: Tensor, goes: Callable[[Tensor, FrameType], bool]) -> Iterator[Tensor]:
    """The rows that `nonzero` gives; `goes` says of a flag whether its place is there, and hears who asks."""
    for place in range(places.shape[0]):
        if goes(mark(places[place], likely=True), calling_frame()):
            yield torch.tensor([place], device=places.device)


FLAGS = (
    *(Patch(owner, name, around(_marked)) for owner in (Tensor, torch) for name in ("any", "all")),
    *(Patch(owner, "nonzero", around(_with_places)) for owner in (Tensor, torch)),
)
"""While the user's code is traced."""
