"""Skip trackers, which hold skip tensors between stash and pop; each thread has a current tracker."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxdp.skip.batch import Batch, Tensors, lane_of
from fxdp.skip.exchange import Exchange
from fxdp.skip.lanes import fork, join, make_phony
from fxdp.skip.namespace import Namespace
from fxdp.skip.portal import Portal, Stream

if TYPE_CHECKING:
    from fxdp.skip.base import Skippable
    from fxdp.skip.layout import SkipLayout


_MODULE_CALL = nn.Module.__call__.__code__


class SkipTracker:
    """A tracker that keeps skip tensors unchanged; the default of each thread, for a plain `nn.Sequential`.

    Attributes
    ----------
    tensors : tensors that were stashed and not yet popped, by `(namespace, name)`.
    """

    def __init__(self) -> None:
        self.tensors: dict[tuple[Namespace | None, str], Any] = {}
        self._call: FrameType | None = None

    def save(self, batch: Tensors, ns: Namespace | None, name: str, tensor: Tensor | None) -> None:
        """Store a tensor stashed by the module that returns `batch`."""
        self.tensors[ns, name] = tensor

    def forget_other_calls(self) -> None:
        """Drop tensors that an earlier call of a model stashed and did not pop."""
        call = _outermost_call()
        if self._call is not call:
            # a stash outside of any model's call, by hand, is available to every pop
            if self._call is not None:
                self.tensors.clear()
            # the frame itself, because a new frame may reuse an address; freed with the last tensor
            self._call = call

    def close_call(self) -> None:
        """Release the frame of the call if no tensor is stored."""
        if not self.tensors:
            self._call = None

    def load(self, batch: Tensors, ns: Namespace | None, name: str) -> Tensor | None:
        """Return and remove the tensor that the module with input `batch` pops.

        Raises
        ------
        KeyError : no tensor is stashed under this name.
        """
        tensor: Tensor | None = self.tensors.pop((ns, name))
        return tensor

    def copy(
        self, batch: Tensors, prev_stream: Stream, next_stream: Stream, ns: Namespace | None, name: str
    ) -> None:
        """Raise TypeError: only portals can copy."""
        raise TypeError("copy is not supported for non-portal skip tensors")

    def exchange(self, skippable: Skippable) -> Exchange:
        """Return an `Exchange` for one forward of a skippable."""
        return Exchange(self, skippable)


class SkipTrackerThroughPortals(SkipTracker):
    """A tracker for one micro-batch that hides tensors which leave their partition in portals."""

    def __init__(self, skip_layout: SkipLayout) -> None:
        super().__init__()
        self.skip_layout = skip_layout
        self.portals: dict[tuple[Namespace | None, str], Portal] = {}

    def save(self, batch: Tensors, ns: Namespace | None, name: str, tensor: Tensor | None) -> None:
        """Put a tensor that leaves its partition into a portal, and tie the portal to `batch`."""
        if not isinstance(tensor, Tensor) or not self.skip_layout.requires_copy(ns, name):
            self._keep(ns, name, tensor)
            return
        lane = _lane(batch, tensor, name)
        life = 1 if _is_recomputing() else 3 if _is_checkpointing() else 2
        portal = self.portals.get((ns, name))
        if portal is None or (portal.hides_grad and not _is_recomputing()):
            portal = self.portals[ns, name] = Portal(tensor, life)
        else:
            portal.put_tensor(tensor, life)
        phony = portal.blue()
        if lane is not None:
            batch[lane] = join(batch[lane], phony)

    def _keep(self, ns: Namespace | None, name: str, tensor: Any) -> None:
        """Keep a tensor without a portal, and drop the outdated portal of an earlier forward."""
        if not _is_recomputing() or not self.skip_layout.requires_copy(ns, name):
            self.portals.pop((ns, name), None)
            super().save(Batch(None), ns, name, tensor)

    def load(self, batch: Tensors, ns: Namespace | None, name: str) -> Tensor | None:
        """Take the tensor out of its portal, behind a fork of `batch`."""
        portal = self.portals.get((ns, name))
        if portal is None:
            if _is_checkpointing() and self.skip_layout.requires_copy(ns, name):
                kept: Tensor | None = self.tensors[ns, name]
                return kept  # None, which the recomputation reads a second time
            return super().load(batch, ns, name)
        portal.check_tensor_life()
        lane = _lane(batch, portal.tensor, name)
        phony = make_phony(batch[lane].device if lane is not None else _device(portal))
        if lane is not None:
            batch[lane], phony = fork(batch[lane])
        return portal.orange(phony)

    def copy(
        self, batch: Tensors, prev_stream: Stream, next_stream: Stream, ns: Namespace | None, name: str
    ) -> None:
        """Copy the tensor to the device of `next_stream`, between two forks of `batch`."""
        if (ns, name) not in self.portals:
            if (ns, name) in self.tensors and self.skip_layout.requires_copy(ns, name):
                return  # None
            super().copy(batch, prev_stream, next_stream, ns, name)
        portal = self.portals[ns, name]
        lane = _lane(batch, portal.tensor, name)
        if lane is None:
            portal.copy(prev_stream, next_stream, make_phony(_device(portal)))
            return
        batch[lane], phony = fork(batch[lane])
        batch[lane] = join(batch[lane], portal.copy(prev_stream, next_stream, phony))


SkipTrackerThroughPotals = SkipTrackerThroughPortals
"""Alias with the misspelled name of torchgpipe."""


def _lane(batch: Tensors, tensor: Tensor | None, name: str) -> int | None:
    """Return the index of the tensor in the batch to which a portal is tied.

    Without recomputation a portal works without a tie; a recomputed partition has no other link to its past.
    """
    lane = lane_of(batch)
    if lane is None and _is_checkpointing() and tensor is not None and tensor.is_floating_point():
        raise RuntimeError(
            f"the gradient of '{name}' could not return through a recomputed partition that passes on no "
            "floating-point tensor. Pass one on beside it, or do not recompute this partition"
        )
    return lane


def _device(portal: Portal) -> torch.device:
    return torch.device("cpu") if portal.tensor is None else portal.tensor.device


def _outermost_call() -> FrameType | None:
    """Return the frame of this thread's outermost module call; None if the skippable itself is outermost."""
    found, inner, frame = None, 0, sys._getframe()
    here: FrameType | None = frame
    while here is not None:
        if here.f_code is _MODULE_CALL:
            found, inner = here, inner + 1
        here = here.f_back
    return found if inner > 1 else None


class _Current(threading.local):
    def __init__(self) -> None:
        self.tracker = self.own = SkipTracker()


_current = _Current()


@contextlib.contextmanager
def skips_of_this_call() -> Iterator[SkipTracker]:
    """Yield the tracker of this thread, for one forward of a skippable.

    The thread's own tracker holds tensors of one call of a model; an installed tracker lives longer.
    """
    tracker = _current.tracker
    if tracker is not _current.own:
        yield tracker
        return
    tracker.forget_other_calls()
    try:
        yield tracker
    finally:
        tracker.close_call()


def current_skip_tracker() -> SkipTracker:
    """Return the tracker of this thread."""
    return _current.tracker


@contextlib.contextmanager
def use_skip_tracker(skip_tracker: SkipTracker) -> Iterator[None]:
    """Use `skip_tracker` for the skips of this thread inside the block."""
    before, _current.tracker = _current.tracker, skip_tracker
    try:
        yield
    finally:
        _current.tracker = before


class _State(threading.local):
    checkpointing = False
    recomputing = False


_state = _State()


@contextlib.contextmanager
def enable_checkpointing() -> Iterator[None]:
    """Mark the forward inside the block as one whose activations are dropped."""
    before, _state.checkpointing = _state.checkpointing, True
    try:
        yield
    finally:
        _state.checkpointing = before


@contextlib.contextmanager
def enable_recomputing() -> Iterator[None]:
    """Mark the forward inside the block as a recomputation for the backward."""
    before, _state.recomputing = _state.recomputing, True
    try:
        yield
    finally:
        _state.recomputing = before


def _is_checkpointing() -> bool:
    """Return whether the activations of the running forward are dropped."""
    return _state.checkpointing


def _is_recomputing() -> bool:
    """Return whether the running forward is a recomputation."""
    return _state.recomputing
