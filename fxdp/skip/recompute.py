"""Thread-local flags: the running forward will be recomputed, or is a recomputation.

Code that drops activations sets the flags by the two context managers below, because a portal must keep a
skip tensor longer if the tensor is read twice.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


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


def is_checkpointing() -> bool:
    """Return whether the activations of the running forward are dropped."""
    return _state.checkpointing


def is_recomputing() -> bool:
    """Return whether the running forward is a recomputation."""
    return _state.recomputing
