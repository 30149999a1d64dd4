"""Suppress torch's messages during tracing in the capturing thread: the caller may turn warnings into errors.

Log levels and `warnings.catch_warnings` apply to the entire process: other threads would lose their warnings,
and two threads that leave in a different order than they entered would leave wrong filters behind for good.
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
"""Logger of refusals by fake kernels, with a stack, before the refusal is raised and reworded."""


def _handle(plain: Callable[..., None], self: logging.Logger, record: logging.LogRecord) -> None:
    """Drop torch's log records below errors, unless the user has enabled more than warnings."""
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
    """Suppress warnings in this thread inside the block; other threads get all warnings."""
    ignored: Any = ("ignore", _Anything(here), Warning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, ignored)
    try:
        yield
    finally:
        # a `catch_warnings` that began or ended meanwhile has replaced the list
        now: Any = warnings.filters
        for each in (filters, now):
            while ignored in each:
                each.remove(ignored)


class _Anything:
    """Stand-in for the pattern of a warnings filter, which matches any message of the capturing thread.

    Python only calls `match` of the pattern.
    """

    def __init__(self, here: Here) -> None:
        self._here = here

    def match(self, text: str) -> bool:
        return self._here.inside
