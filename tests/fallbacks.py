"""Tests of what Inductor compiles must not pass by way of the program that runs without it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Refuses(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("Inductor cannot compile"):
            raise AssertionError(text)


@contextlib.contextmanager
def no_fallback() -> Iterator[None]:
    """Raise where a program falls back from Inductor."""
    logger, handler = logging.getLogger("fxdp"), _Refuses()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
