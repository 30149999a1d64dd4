"""The demonstration from the command line, with few steps, on real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def _demo(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fxdp", "demo", "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=1", ["--compute", "eager", "--batch", "2"]),
        ("dp=2", ["--compute", "eager", "--batch", "3", "--dtype", "float64"]),
    ],
)
def test_the_losses_are_those_of_one_device(tmp_path: Path, mesh: str, options: list[str]) -> None:
    out = tmp_path / "curves.png"
    shown = _demo(out, "--steps", "3", "--mesh", mesh, *options)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "the same within rounding" in shown.stdout
    assert "communication of one step" in shown.stdout
    assert ("all_reduce" in shown.stdout) == (mesh != "dp=1")
    assert out.read_bytes().startswith(b"\x89PNG")
