"""The demonstration from the command line, with few steps, on real processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from fxdp.cli import main
from fxdp.cli.demo.model import GPTConfig
from tests.rank_pool import RankPool


def _options(mesh: str, out: Path, *options: str) -> list[str]:
    return ["demo", "--backend", "eager", "--steps", "3", "--mesh", mesh, "--out", str(out), *options]


def _small(options: list[str]) -> int:
    """The command with one layer."""
    with mock.patch("fxdp.cli.demo.training.GPTConfig", partial(GPTConfig, layers=1, width=32)):
        return main(options)


def _check(shown: str, out: Path, *, reduces: bool) -> None:
    assert "the same within rounding" in shown
    assert "communication of one step" in shown
    wide = [line for line in shown.splitlines() if len(line) > 80]
    assert wide in ([], [f"loss curves: {out}"]), "in a pipe, and in a terminal of 80 columns"
    assert ("all_reduce" in shown) == reduces
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_losses_of_one_rank_are_those_of_one_device(ranks: RankPool, tmp_path: Path) -> None:
    out = tmp_path / "curves.png"
    (ended,) = ranks.spawn(1, _small, _options("dp=1", out, "--batch", "2"), init=False)
    assert (ended.status, ended.result) == (0, 0), ended.output
    _check(ended.output, out, reduces=False)


def test_the_losses_of_two_ranks_are_those_of_one_device(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Which the command starts by itself."""
    out = tmp_path / "curves.png"
    assert _small(_options("dp=2", out, "--batch", "3", "--dtype", "float64")) == 0
    shown = capfd.readouterr().out
    assert "    epoch 1: loss" in shown
    assert "  the same lines" in shown
    _check(shown, out, reduces=True)
