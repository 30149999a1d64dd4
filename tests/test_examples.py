"""The examples: the same curve alone and on several ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from fxdp.demo.launch import launch
from tests.ranks import RankPool

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def _unet_curve(*options: str) -> list[float]:
    """The losses that the example prints, run in this process as torchrun would."""
    variables = {}
    if dist.is_initialized():
        rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # not used: there is a process group
    shown = io.StringIO()
    given = ["skippable_unet.py", "--epochs", "2", "--images", "150", *options]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", given))
        stack.enter_context(mock.patch.dict(os.environ, variables))
        stack.enter_context(contextlib.redirect_stdout(shown))
        runpy.run_path(str(EXAMPLES / "skippable_unet.py"), run_name="__main__")
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown.getvalue())]


def test_the_unet_has_the_same_curve_plain_and_on_two_ranks(ranks: RankPool) -> None:
    plain = _unet_curve("--plain")
    assert len(plain) == 2
    compiled, _ = ranks.run(2, _unet_curve, "--compute", "eager", timeout=240)
    assert compiled == pytest.approx(plain, rel=1e-4)


def test_digits_have_the_same_curve_on_three_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    curves = []
    for ranks in (1, 3):
        command = [sys.executable, str(EXAMPLES / "train_mlp.py"), "--epochs", "2", "--compute", "eager"]
        assert launch(command, ranks, timeout=240) == 0
        curves.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", capfd.readouterr().out)])
    assert len(curves[0]) == 2
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_an_op_of_ones_own_is_proven_and_sends_only_its_gradient(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch([sys.executable, str(EXAMPLES / "custom_op.py")], 1, timeout=120) == 0
    shown = capfd.readouterr().out
    assert "S(0), S(0), R -> S(0), P(sum)" in shown
    assert "four ranks compute what one device does" in shown
    assert re.findall(r"    (\w+): \d+ bytes", shown) == ["all_reduce", "all_reduce"]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown)]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 5
