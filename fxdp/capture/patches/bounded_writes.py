"""Writes up to a place that the data says, as writes of all places that keep what they are not to change.

    mask[i, : lengths[i]] = True        first = torch.arange(mask.shape[1]) < lengths[i]
                                        mask[i] = torch.where(first, True, mask[i])

A slice would be as long as a number that is not known while the model is captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_bounded(key: Any, value: Any) -> bool:
    """Whether a write of one number goes to slices of some dims, the bounds of one of which are tensors."""
    if not isinstance(key, tuple) or (isinstance(value, Tensor) and value.dim()):
        return False
    return all(isinstance(part, (int, torch.SymInt, slice)) for part in key) and any(map(_is_open, key))


def write_bounded(of: Tensor, key: Any, value: Any) -> None:
    """Write a number to such slices of a tensor."""
    bounded = [_is_open(part) for part in key]
    opened = tuple(slice(None) if open_ else part for part, open_ in zip(key, bounded, strict=True))
    kept = of[opened]
    sliced = [(part, open_) for part, open_ in zip(key, bounded, strict=True) if isinstance(part, slice)]
    for dim, (part, open_) in enumerate(sliced):
        if open_:
            chosen = _places(part, kept.shape[dim], kept.device)
            value = torch.where(chosen.view(-1, *[1] * (kept.dim() - dim - 1)), value, kept)
    of[opened] = value


def _is_open(part: Any) -> bool:
    bounds = (part.start, part.stop) if isinstance(part, slice) and part.step is None else ()
    return any(isinstance(bound, Tensor) for bound in bounds)


def _places(part: slice, size: Any, device: torch.device) -> Tensor:
    """Which places of a dim are in a slice."""
    places = torch.arange(size, device=device)
    start, stop = _bound(part.start, 0, size), _bound(part.stop, size, size)
    chosen: Tensor = (places >= start) & (places < stop)
    return chosen


def _bound(bound: Any, default: Any, size: Any) -> Any:
    """A bound as a place; a negative one counts from the end."""
    if bound is None:
        return default
    if isinstance(bound, Tensor):
        place = bound.reshape(())
        return torch.where(place < 0, place + size, place)
    return bound + size if bound < 0 else bound
