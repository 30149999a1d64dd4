"""What a compilation decided, on torch's channels: the log, and the structured trace."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import fxdp
from fxdp.torch_compat import tracing


@contextmanager
def _level(level: int) -> Iterator[None]:
    log = logging.getLogger("fxdp")
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


def test_the_plain_logger_tells_the_same(caplog: pytest.LogCaptureFixture) -> None:
    model, x = torch.nn.Linear(4, 2), torch.randn(2, 4)
    for level, told in ((logging.INFO, False), (logging.DEBUG, True)):
        caplog.clear()
        with _level(level):
            fxdp.plan(model, (x,))
        assert "captured a joint graph of" in caplog.text
        assert ("Linear on mesh(dp=2), a batch of 4" in caplog.text) is told
        assert ("canonicalize took" in caplog.text) is told


def test_nobody_reads_a_trace_that_goes_nowhere() -> None:
    assert not tracing()
