"""Slices whose bounds are tensors, as the rows between them, and rows that a mask selects.

    for i, (start, end) in enumerate(zip(ends[:-1], ends[1:])):         rows = nonzero(start <= i and i < end)
        out[start:end] = x[start:end] @ weight[i]                       out[rows] = x[rows] @ weight[i]

    mask[i, : lengths[i]] = True            mask[i] = torch.where(torch.arange(n) < lengths[i], True, mask[i])

Python asks a bound for its value. As rows a slice is no view: what writes into one in place is refused. How
many rows these are only the data knows; of a mask's rows the code may be told (`unbacked_hints.py`). A number
is written to all places up to a bound as to all there are, which keep what it is not to change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxdp.capture.locations import location_of_call
from fxdp.capture.patches.unbacked_hints import UnbackedHints
from fxdp.errors import CaptureError
from fxdp.ir.metadata import Location
from fxdp.torch_compat import known_number


class TensorSlices(TorchFunctionMode):
    """Active while one run of the model's code is traced.

    No patch of `Tensor.__getitem__`: CPython would take tensors for sequences ever after, index by index.
    """

    def __init__(self, told: UnbackedHints) -> None:
        super().__init__()
        self._told = told
        self._rows: dict[Any, tuple[Any, Any, Tensor]] = {}
        self._taken: list[tuple[Tensor, int, Location]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__setitem__ and _is_bounded(*args[1:]) and location_of_call().file:
            _write_bounded(*args)
            return None
        if (mask := selecting_mask(func, args)) is not None:
            return self._selected(mask, func, args, kwargs or {})
        if func not in _INDEXING or not _is_open(args[1]):
            return func(*args, **(kwargs or {}))
        location = location_of_call()
        of, key, *value = args
        made = func(of, self._rows_of(of, key), *value)
        if func is Tensor.__getitem__:
            self._taken.append((made, made._version, location))
        return made

    def _selected(self, mask: Tensor, func: Any, args: Any, kwargs: Any) -> Any:
        places = self._told.selected(mask, location_of_call())
        if places is None:
            return func(*args, **kwargs)
        if func is Tensor.__getitem__:
            return func(args[0], places.unbind(1))
        apart = func is torch.where or kwargs.get("as_tuple")
        return places.unbind(1) if apart else places

    def settle(self) -> None:
        """At the end of the run.

        Raises
        ------
        CaptureError : something was written into a slice, of which the sliced tensor would not know.
        """
        for made, version, location in self._taken:
            if made._version != version:
                raise CaptureError(
                    f"at {location}: a slice whose bounds are tensors is written in place. Assign to the "
                    "slice "
                    "instead: x[start:end] = x[start:end] + 1"
                )

    def _rows_of(self, of: Tensor, key: slice) -> Tensor:
        """The rows of a slice: one tensor for the same bounds, so that a trace knows they are as many."""
        size = of.shape[0]
        known = id(key.start), id(key.stop), str(size)
        if known not in self._rows:
            rows = _chosen(key, size, of.device).nonzero().squeeze(1)
            self._rows[known] = key.start, key.stop, rows  # held, or their ids would be those of others
        return self._rows[known][2]


_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_NONZERO = (Tensor.nonzero, torch.nonzero)


def selecting_mask(func: Any, args: Any) -> Tensor | None:
    """The mask by which a function selects: `x[mask]`, `mask.nonzero()`, `torch.where(mask)`."""
    if func is Tensor.__getitem__:
        return args[1] if isinstance(args[1], Tensor) and args[1].dtype == torch.bool else None
    one = len(args) == 1 and isinstance(args[0], Tensor)
    return args[0] if one and (func in _NONZERO or func is torch.where) else None


def _is_open(key: Any) -> bool:
    """Whether a key is a slice of which the data knows a bound."""
    if not isinstance(key, slice) or key.step not in (None, 1):
        return False
    bounds = [bound for bound in (key.start, key.stop) if isinstance(bound, Tensor)]
    integers = all(b.numel() == 1 and not b.is_floating_point() and b.dtype != torch.bool for b in bounds)
    return integers and any(known_number(bound.reshape(())) is None for bound in bounds)


def _is_bounded(key: Any, value: Any) -> bool:
    """Whether a write of one number goes to slices of some dims, the bounds of one of which are tensors."""
    if not isinstance(key, tuple) or (isinstance(value, Tensor) and value.dim()):
        return False
    return all(isinstance(part, (int, torch.SymInt, slice)) for part in key) and any(map(_has_tensor, key))


def _write_bounded(of: Tensor, key: Any, value: Any) -> None:
    """Write a number to such slices of a tensor."""
    bounded = [_has_tensor(part) for part in key]
    opened = tuple(slice(None) if open_ else part for part, open_ in zip(key, bounded, strict=True))
    kept = of[opened]
    sliced = [(part, open_) for part, open_ in zip(key, bounded, strict=True) if isinstance(part, slice)]
    for dim, (part, open_) in enumerate(sliced):
        if open_:
            chosen = _chosen(part, kept.shape[dim], kept.device)
            value = torch.where(chosen.view(-1, *[1] * (kept.dim() - dim - 1)), value, kept)
    of[opened] = value


def _has_tensor(part: Any) -> bool:
    bounds = (part.start, part.stop) if isinstance(part, slice) and part.step is None else ()
    return any(isinstance(bound, Tensor) for bound in bounds)


def _chosen(part: slice, size: Any, device: torch.device) -> Tensor:
    """Which places of a dim are in a slice."""
    places = torch.arange(size, device=device)
    start, stop = _from_front(part.start, 0, size), _from_front(part.stop, size, size)
    chosen: Tensor = (places >= start) & (places < stop)
    return chosen


def _from_front(bound: Any, default: Any, size: Any) -> Any:
    """A bound counted from the front; beyond the ends it selects what there is in either form."""
    if bound is None:
        return default
    if not isinstance(bound, Tensor):
        return bound if bound >= 0 else bound + size
    bound = bound.reshape(())
    return torch.where(bound < 0, bound + size, bound)
