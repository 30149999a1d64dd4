"""Slices with tensors as bounds, as the rows between the bounds; and rows selected by a mask.

    for i, (start, end) in enumerate(zip(ends[:-1], ends[1:])):         rows = nonzero(start <= i and i < end)
        out[start:end] = x[start:end] @ weight[i]                       out[rows] = x[rows] @ weight[i]

    mask[i, : lengths[i]] = True            mask[i] = torch.where(torch.arange(n) < lengths[i], True, mask[i])

Python reads the value of a bound. As rows, a slice is not a view, so in-place writes into a slice are
refused. The number of rows depends on data; for rows of a mask the code may get a hint
(`capture/patches/unbacked_hints.py`).
A number is written to all elements up to a bound by a write to all elements, in which the remaining ones keep
their value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxdp.capture.locations import location_of_call
from fxdp.capture.patches.unbacked_hints import UnbackedHints
from fxdp.capture.refusals.eager_probe import selecting_mask
from fxdp.errors import CaptureError
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat import known_number


class TensorSlices(TorchFunctionMode):
    """Mode for the trace of one run of the model's code.

    Not a patch of `Tensor.__getitem__`: CPython would then treat tensors as sequences forever, index by
    index.
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
        """Check at the end of the run that no slice was written.

        Raises
        ------
        CaptureError : a slice was written in place, which the sliced tensor would not see.
        """
        for made, version, location in self._taken:
            if made._version != version:
                raise CaptureError(
                    f"at {location}: a slice whose bounds are tensors is written in place. Assign to the "
                    "slice instead: x[start:end] = x[start:end] + 1"
                )

    def _rows_of(self, of: Tensor, key: slice) -> Tensor:
        """Return the rows of a slice as indices.

        Equal bounds get the same tensor, so that a trace knows that the numbers of rows are equal.
        """
        size = of.shape[0]
        known = id(key.start), id(key.stop), str(size)
        if known not in self._rows:
            rows = _chosen(key, size, of.device).nonzero().squeeze(1)
            self._rows[known] = key.start, key.stop, rows  # kept alive, so that ids stay unique
        return self._rows[known][2]


_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


def _is_open(key: Any) -> bool:
    """Return whether a key is a slice with a data-dependent bound."""
    if not isinstance(key, slice) or key.step not in (None, 1):
        return False
    bounds = [bound for bound in (key.start, key.stop) if isinstance(bound, Tensor)]
    integers = all(b.numel() == 1 and not b.is_floating_point() and b.dtype != torch.bool for b in bounds)
    return integers and any(known_number(bound.reshape(())) is None for bound in bounds)


def _is_bounded(key: Any, value: Any) -> bool:
    """Return whether one number is written to slices of some dims, of which one has tensors as bounds."""
    if not isinstance(key, tuple) or (isinstance(value, Tensor) and value.dim()):
        return False
    return all(isinstance(part, (int, torch.SymInt, slice)) for part in key) and any(map(_has_tensor, key))


def _write_bounded(of: Tensor, key: Any, value: Any) -> None:
    """Write a number to slices of a tensor with tensors as bounds."""
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
    """Return the mask of the elements of a dim that are in a slice."""
    places = torch.arange(size, device=device)
    start, stop = _from_front(part.start, 0, size), _from_front(part.stop, size, size)
    chosen: Tensor = (places >= start) & (places < stop)
    return chosen


def _from_front(bound: Any, default: Any, size: Any) -> Any:
    """Return a bound counted from the front.

    A bound beyond the ends selects the same elements in either form.
    """
    if bound is None:
        return default
    if not isinstance(bound, Tensor):
        return bound if bound >= 0 else bound + size
    bound = bound.reshape(())
    return torch.where(bound < 0, bound + size, bound)
