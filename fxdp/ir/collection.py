"""Python's garbage collection, and when it would only cost time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["no_collection"]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Tracing and passes make a million objects that live on.

    A full collection goes through all of them, and all that a model holds in memory, again and again: a
    fifth of the time of a trace, and more than the passes take themselves.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
