"""Pipelines over real gloo ranks through the public API, equal to one eager device on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.runs import Run, errors_of, know
from tests.rank_pool import RankPool

SKIP_OF_FOUR = Run("skips", 4, stages=["b", "c", "d"], microbatches=4)
"""A skip from stage 0 to 3, and a value that two later stages use, under 1F1B."""

TWO = (
    Run("skips", 2, microbatches=1),
    Run("skips", 2, schedule="gpipe", microbatches=8, batches=((8,), (7,), (3,))),
    Run("skips", 2, schedule="interleaved", stages=4, microbatches=3, batches=((7,),)),
    Run("skips", 2, schedule="zero-bubble", microbatches=4),
    Run("unet", 2, checkpoint="always", batches=((5,),)),
    Run("gpt2", 2, microbatches=4, batches=((7,), (8,))),
    Run("llama", 2, schedule="zero-bubble", microbatches=2),
    Run("t5", 2, schedule="gpipe", microbatches=2, checkpoint="except_last"),
)
MICROBATCHES_ALONE = (
    Run("skips", 1, 2, microbatches=2, batches=((4, 3), (5, 0), (1, 2))),
    Run("gpt2", 1, 2, microbatches=3, batches=((4, 3),)),
)
THREE = (
    Run("unet", 3, schedule="gpipe", microbatches=4),
    Run("gpt2", 3, microbatches=2),
    Run("skips", 3, schedule="zero-bubble", microbatches=5, batches=((7,),)),
)
FOUR = (
    Run("gpt2", 2, 2, batches=((4, 3), (5, 0))),
    Run("unet", 4, microbatches=3, batches=((7,),)),
    Run("t5", 4, microbatches=4),
    Run("skips", 2, 2, stages=4, schedule="interleaved", batches=((3, 2),)),
)


def _check(ranks: RankPool, world: int, runs: tuple[Run, ...]) -> None:
    ranks.prepare(know, ("skips", "unet", "gpt2", "llama", "t5"))
    found = ranks.run(world, errors_of, runs)
    for run, errors in zip(runs, zip(*found, strict=True), strict=True):
        assert max(errors) <= 1e-9, f"{run}: {errors}"


FILES = {
    "first stage on the last rank": (2, "1F1,1B1,1F0,1B0\n0F1,0F0,0B1,0B0\n"),
    "entire and halved backwards of one stage": (2, "0F0,0F1,0B0,0I1,0W1\n1F0,1I0,1F1,1W0,1B1\n"),
    "a V of stages": (4, "0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n"),
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_schedules_from_files(ranks: RankPool, tmp_path: Path, backend: str) -> None:
    names = list(FILES) if backend == "eager" else ["entire and halved backwards of one stage"]
    runs = []
    for name in names:
        stages, order = FILES[name]
        path = tmp_path / f"{name}.csv"
        path.write_text(order)
        runs.append(Run("skips", 2, 1, str(path), 2, stages, ((5,),), backend))
    _check(ranks, 2, tuple(runs))


def test_a_skip_over_two_stages_under_1f1b(ranks: RankPool) -> None:
    _check(ranks, 4, (SKIP_OF_FOUR,))


@pytest.mark.parametrize("runs", [TWO, MICROBATCHES_ALONE], ids=["pp", "dp"])
def test_two_ranks(ranks: RankPool, runs: tuple[Run, ...]) -> None:
    _check(ranks, 2, runs)


def test_three_ranks(ranks: RankPool) -> None:
    _check(ranks, 3, THREE)


def test_four_ranks(ranks: RankPool) -> None:
    _check(ranks, 4, FOUR)


def test_compiled_by_inductor(ranks: RankPool) -> None:
    """Halves of backwards, and micro-batches of several sizes: the schedules from files."""
    _check(ranks, 2, (Run("unet", 2, backend="inductor", microbatches=2, batches=((8,),)),))
