"""What a compilation decided, on torch's channels: the log, and the structured trace."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fxdp
from fxdp.torch_compat import tracing

ROOT = Path(__file__).resolve().parents[2]
_ASKED = """
import torch, fxdp
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
loss = lambda y, target: (y - target).square().mean()
x = torch.randn(4, 4)
fxdp.plan(model, (x,), {"target": torch.randn(4, 2)}, mesh={"pp": 2, "dp": 2}, microbatches=2, loss_fn=loss)
"""


def _artifacts(folder: Path) -> dict[str, str]:
    """The texts of the structured trace by name; each stands, indented, below the line that names it."""
    (file,) = folder.iterdir()
    found: dict[str, list[str]] = {}
    name = ""
    for line in file.read_text().splitlines():
        if not line.startswith("\t"):
            about = json.loads(line.partition("] ")[2] or "{}")
            name = about.get("artifact", {}).get("name", "")
        else:
            found.setdefault(name, []).append(line[1:])
    return {name: "\n".join(lines) for name, lines in found.items()}


def test_the_environment_turns_channels_on(tmp_path: Path) -> None:
    channels = {"TORCH_LOGS": "+fxdp", "TORCH_TRACE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    asked = [sys.executable, "-c", _ASKED]
    shown = subprocess.run(
        asked, env={**os.environ, **channels}, capture_output=True, text=True, timeout=120, check=True
    ).stderr
    assert "captured a joint graph of" in shown
    assert "Sequential on mesh(pp=2, dp=2), a batch of 8" in shown
    assert "rank 1: .  F0" in shown
    found = _artifacts(tmp_path)
    assert "%_0_weight: f32[4, 4] = param(0.weight)" in found["fxdp_joint_graph"]
    assert "all_reduce" not in found["fxdp_joint_graph"]
    assert "dp=P(sum)" in found["fxdp_placements"]
    assert {"send", "all_reduce"} <= {row["kind"] for row in json.loads(found["fxdp_communication"])}
    assert found["fxdp_schedule"].startswith("rank 0: F0")


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
