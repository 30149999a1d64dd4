"""Tests of what Inductor compiles must not pass by way of a program that runs without it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_SAID = ("Inductor cannot compile", "repeated layers are left out")
"""How lines begin that tell of a fallback; the second is a debug line, and a bug of fxdp's."""


class _Refuses(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(_SAID):
            raise AssertionError(text)


@contextlib.contextmanager
def no_fallback() -> Iterator[None]:
    """Raise where a program falls back from Inductor, or a half from its segments."""
    logger, handler, level = logging.getLogger("fxdp"), _Refuses(), logging.getLogger("fxdp").level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
