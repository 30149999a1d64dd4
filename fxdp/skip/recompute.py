"""Whether this thread runs a forward that will be recomputed, or recomputes one.

Whoever drops activations tells the portals by these two context managers: a skip that is read twice has to
live longer.
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
    """Inside, a forward runs whose activations are dropped."""
    before, _state.checkpointing = _state.checkpointing, True
    try:
        yield
    finally:
        _state.checkpointing = before


@contextlib.contextmanager
def enable_recomputing() -> Iterator[None]:
    """Inside, a forward runs once more, for its backward."""
    before, _state.recomputing = _state.recomputing, True
    try:
        yield
    finally:
        _state.recomputing = before


def is_checkpointing() -> bool:
    """Whether the activations of the running forward are dropped."""
    return _state.checkpointing


def is_recomputing() -> bool:
    """Whether the running forward is a recomputation."""
    return _state.recomputing
