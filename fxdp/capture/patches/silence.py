"""What torch says while it traces, kept from the capturing thread: the caller may treat warnings as errors.

Levels of loggers and `warnings.catch_warnings` are the process's: other threads would lose their warnings,
and two that leave in another order than they came would leave the one's filters behind for good.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from fxdp import torch_compat
from fxdp.torch_compat import Here, Patch, around

_REFUSALS = "torch._subclasses.fake_tensor"
"""Logs with a stack what a fake kernel refuses, before the refusal is raised and reworded."""


def _handle(plain: Callable[..., None], self: logging.Logger, record: logging.LogRecord) -> None:
    """Torch's records below an error go nowhere, if nobody has asked for more than warnings."""
    told = logging.CRITICAL if self.name == _REFUSALS else logging.ERROR
    torchs = self.name.partition(".")[0] == "torch"
    if not torchs or record.levelno >= told or self.getEffectiveLevel() < logging.WARNING:
        plain(self, record)


SILENCE: tuple[Patch, ...] = (
    Patch(logging.Logger, "handle", around(_handle)),
    Patch(*torch_compat.EXPORT_PRINT, around(lambda *args, **kwargs: None)),
)


@contextlib.contextmanager
def unwarned(here: Here) -> Iterator[None]:
    """No warning is shown or raised in this thread; in others all are."""
    ignored: Any = ("ignore", _Anything(here), Warning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, ignored)
    try:
        yield
    finally:
        # a `catch_warnings` that began or ended meanwhile has exchanged the list
        now: Any = warnings.filters
        for each in (filters, now):
            while ignored in each:
                each.remove(ignored)


class _Anything:
    """Stands where a filter has the compiled pattern of a message, of which Python only calls `match`."""

    def __init__(self, here: Here) -> None:
        self._here = here

    def match(self, text: str) -> bool:
        return self._here.inside
