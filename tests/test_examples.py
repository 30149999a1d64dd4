"""The examples: the same curve alone and on several ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.notebook import displayed
from tests.rank_pool import RankPool, free_port

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def _run(name: str, *options: str) -> None:
    """Run an example in this process as torchrun would."""
    with (
        mock.patch.object(sys, "argv", [name, *options]),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
    ):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def _shown(name: str, *options: str) -> str:
    """What an example prints."""
    variables = {}
    if dist.is_initialized():
        rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # not used: there is a process group
    shown = io.StringIO()
    with mock.patch.dict(os.environ, variables), contextlib.redirect_stdout(shown):
        _run(name, *options)
    return shown.getvalue()


def _unet_curve(*options: str) -> list[float]:
    """The losses that the U-Net prints."""
    shown = _shown("skippable_unet.py", "--epochs", "2", "--images", "150", *options)
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown)]


def test_the_unet_has_the_same_curve_plain_and_on_two_ranks(ranks: RankPool) -> None:
    plain = _unet_curve("--plain")
    assert len(plain) == 2
    compiled, _ = ranks.run(2, _unet_curve, "--backend", "eager")
    assert compiled == pytest.approx(plain, rel=1e-4)


def test_digits_have_the_same_curve_on_three_ranks(ranks: RankPool) -> None:
    curves = []
    for world in (1, 3):
        shown, *others = ranks.run(world, _shown, "train_mlp.py", "--epochs", "2", "--backend", "eager")
        assert others == [""] * (world - 1)
        curves.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", shown)])
    assert len(curves[0]) == 2
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_an_op_of_ones_own_is_proven_and_sends_only_its_gradient(ranks: RankPool) -> None:
    (outcome,) = ranks.spawn(1, _shown, "custom_op.py", init=False)
    assert outcome.status == 0, outcome.output
    shown = outcome.result
    assert "S(0), S(0), R -> S(0), P(sum)" in shown
    assert "four ranks compute what one device does" in shown
    assert re.findall(r"    (\w+): \d+ bytes", shown) == ["all_reduce", "all_reduce"]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown)]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 5


def _pipeline(ranks: RankPool, world: int, name: str, *options: str) -> str:
    """What an example over stages prints, after a check that its losses are those of one device."""
    shown, *others = ranks.run(world, _shown, name, "--steps", "2", "--backend", "eager", *options)
    assert others == [""] * (world - 1)
    pairs = re.findall(r"loss ([\d.]+), on one device ([\d.]+)", shown)
    assert len(pairs) == 2
    for loss, expected in pairs:
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    (furthest,) = re.findall(r"equal those of one device to ([\de.+-]+)", shown)
    assert float(furthest) < 1e-5
    return shown


def test_skips_of_the_unet_go_past_the_stage_in_between(ranks: RankPool) -> None:
    shown = _pipeline(ranks, 3, "unet_pipeline.py", "--schedule", "gpipe")
    assert len(re.findall(r"forward: \w+ from pipeline rank 0 to 2, skip skip@", shown)) == 2


def test_a_gpt_in_two_stages(ranks: RankPool) -> None:
    shown = _pipeline(ranks, 2, "gpt_pipeline.py")
    assert "stage 1 on rank 1" in shown
    assert "rank 0: F0 F1 .  .  B0 B0 F2" in shown


def _losses(shown: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", shown)}


def test_a_killed_run_goes_on_with_more_ranks(ranks: RankPool, tmp_path: Path) -> None:
    options = ["train_sharded.py", "--steps", "20", "--backend", "eager", "--folder"]
    full, _ = ranks.run(2, _shown, *options, str(tmp_path / "full"))
    killed = ranks.spawn(1, _shown, *options, str(tmp_path), "--kill-after", "13", init=False)
    assert [outcome.status for outcome in killed] == [-9]
    resumed, *others = ranks.run(3, _shown, *options, str(tmp_path), "--resume")
    assert resumed.startswith("going on after step 10 with 3 ranks")
    assert others == ["", ""]
    assert set(_losses(resumed)) == {15, 20}
    for step, loss in _losses(resumed).items():
        assert loss == pytest.approx(_losses(full)[step], rel=1e-4)


def _displayed(folder: str) -> list[dict[str, Any]]:
    """What the cells of the notebook display, by kinds of text."""
    warnings.simplefilter("default")
    return displayed(EXAMPLES / "inspect.ipynb", folder)


def test_the_notebook_shows_what_was_decided(ranks: RankPool, tmp_path: Path) -> None:
    (outcome,) = ranks.spawn(1, _displayed, str(tmp_path), init=False)
    assert outcome.status == 0, outcome.output
    imports, plan, *others = outcome.result
    assert imports == {}
    assert all(others)
    assert "Classifier on mesh(dp=64), a batch of 512" in plan["text/html"]
    assert any("<svg" in "".join(map(str, one.values())) for one in others)
    pair = others[-1]["text/plain"]
    assert pair.count("1.") + pair.count("2.") >= 2, pair


def _curve(shown: str) -> list[tuple[int, float]]:
    """Steps and losses; those since the last checkpoint twice, where a run was begun again."""
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+): loss (\S+)\n", shown)]


def _torchrun(name: str, *options: str) -> None:
    """The example on two ranks, as torchrun runs it; by its Python interface, which can fork ranks."""
    endpoint = f"127.0.0.1:{free_port()}"
    config = LaunchConfig(
        1, 1, 2, max_restarts=1, run_id="none", rdzv_backend="static", rdzv_endpoint=endpoint,
        rdzv_configs={"rank": 0}, start_method="fork", monitor_interval=0.1,
    )  # fmt: skip
    warnings.simplefilter("default")  # a program's own
    elastic_launch(config, _run)(name, *options)


def test_torchrun_begins_again_after_a_killed_rank_and_on_fewer_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    example, options = "train_elastic.py", ["--backend=eager", f"--folder={tmp_path / 'killed'}"]
    killed = [*options, "--steps=12", "--kill-after=7"]
    (restarted,) = ranks.spawn(1, _torchrun, example, *killed, init=False)
    assert restarted.status == 0, restarted.output
    (fewer,) = ranks.run(1, _shown, example, *options, "--steps=14")
    (full,) = ranks.run(1, _shown, example, options[0], f"--folder={tmp_path / 'full'}", "--steps=14")
    begun = re.findall(r"going on .*", restarted.output + fewer)
    assert begun == [f"going on after step {step} with {n} ranks" for step, n in ((0, 2), (5, 2), (10, 1))]
    found, expected = _curve(restarted.output + fewer), dict(_curve(full))
    assert [step for step, _ in found] == [*range(1, 8), *range(6, 13), *range(11, 15)]
    assert [loss for _, loss in found] == pytest.approx([expected[step] for step, _ in found], rel=1e-9)
