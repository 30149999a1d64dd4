"""The examples: the same curve alone and on several ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fxdp.demo.launch import launch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_digits_have_the_same_curve_on_three_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    curves = []
    for ranks in (1, 3):
        command = [sys.executable, str(EXAMPLES / "train_mlp.py"), "--epochs", "2", "--compute", "eager"]
        assert launch(command, ranks, timeout=240) == 0
        curves.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", capfd.readouterr().out)])
    assert len(curves[0]) == 2
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
