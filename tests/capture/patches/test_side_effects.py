"""What a forward does beside computing happens at each call on one device: compiled, it is told by line."""

from __future__ import annotations

import contextvars
import io
import logging
import queue
import random
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxdp

WAITING: queue.Queue[int] = queue.Queue()
LOCAL = threading.local()
LOCAL.calls = 0
DEPTH = contextvars.ContextVar("DEPTH", default=0)
NOTES = io.StringIO()
FILE = Path()


class _Model(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(3, 4), act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        self.act(self, y)
        return y.square().mean()


def _count(model: Any) -> None:
    type(model).calls = getattr(type(model), "calls", 0) + 1


def _local() -> None:
    LOCAL.calls += 1


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda model, y: print(y.shape), "prints at"),
        (lambda model, y: sys.stderr.write("seen"), "prints at"),
        (lambda model, y: logging.getLogger("mine").debug("seen"), ""),
        (lambda model, y: logging.getLogger("mine").error("seen"), "logs at"),
        (lambda model, y: warnings.warn("long", stacklevel=1), "warns at"),
        (lambda model, y: FILE.write_text("seen"), "writes a file at"),
        (lambda model, y: torch.save({}, FILE), "writes a file at"),
        (lambda model, y: FILE.exists() and FILE.read_text(), ""),
        (lambda model, y: random.random(), "draws by random.random at"),
        (lambda model, y: np.random.uniform(0, 1), "draws by numpy.random.uniform at"),
        (lambda model, y: WAITING.put(1), "sets the global WAITING at"),
        (lambda model, y: _local(), "sets the global LOCAL at"),
        (lambda model, y: DEPTH.set(DEPTH.get() + 1), "sets the global DEPTH at"),
        (lambda model, y: NOTES.write("seen"), "sets the global NOTES at"),
        (lambda model, y: _count(model), "sets calls of class _Model at"),
    ],
)
def test_an_effect_of_a_forward_is_told_by_line(
    act: Callable[[Any, Tensor], object],
    told: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(globals(), "FILE", tmp_path / "seen.txt")
    with caplog.at_level(logging.WARNING, "fxdp"):
        fxdp.compile(_Model(act), backend="eager")(torch.randn(5, 3)).backward()
    texts = [record.getMessage() for record in caplog.records if record.name == "fxdp"]
    assert len(texts) == bool(told)
    assert all(text.startswith(f"the forward {told} {__file__}:") for text in texts)
    assert not hasattr(_Model, "calls")
