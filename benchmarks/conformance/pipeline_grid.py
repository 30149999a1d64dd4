"""Every model x ranks x schedule x micro-batches of a grid, over gloo ranks, beside one eager device.

    python -m benchmarks.conformance.pipeline_grid --model gpt2 --ranks 3

A run compares outputs, the loss and every gradient on every rank, for each batch size in turn: 8, 7 (the last
micro-batch is smaller) and 2 (fewer samples than micro-batches, so that some are empty). Each model is
captured once per rank process; placement, cut, schedule and program are made anew in each run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.pipeline.runs import Run, outcomes_of
from tests.rank_pool import RankError, RankPool

MODELS = ("skips", "unet", "skippable", "gpt2", "llama", "t5")
PLACES = {"2": (2, None), "3": (3, None), "4": (4, None), "4on2": (2, 4)}
"""Ranks and stages; None: the schedule's default, one stage per rank or two if interleaved."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
MICROBATCHES = (1, 2, 4, 8)
BATCHES = ((8,), (7,), (2,))
LIMIT = 1e-9


def grid(models: Sequence[str], places: Sequence[str]) -> Iterator[tuple[int, tuple[Run, ...]]]:
    """The runs of each model and number of ranks."""
    for model, place in itertools.product(models, places):
        ranks, stages = PLACES[place]
        yield (
            ranks,
            tuple(
                Run(model, ranks, 1, schedule, microbatches, stages, BATCHES)
                for schedule, microbatches in itertools.product(SCHEDULES, MICROBATCHES)
            ),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--ranks", nargs="*", choices=PLACES, default=tuple(PLACES))
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each slice")
    parser.add_argument("--json", type=Path, help="write all outcomes here, one JSON object per line")
    chosen = parser.parse_args()
    pool, failed, count, worst = RankPool(), 0, 0, 0.0
    try:
        for ranks, runs in grid(chosen.model, chosen.ranks):
            start = time.perf_counter()
            outcomes = _outcomes(pool, ranks, runs, chosen.timeout)
            seconds = time.perf_counter() - start
            numbers = [o for o in outcomes if isinstance(o, float)]
            bad = [(r, o) for r, o in zip(runs, outcomes, strict=True) if not _passes(o)]
            count, failed = count + len(runs), failed + len(bad)
            worst = max([worst, *numbers])
            print(
                f"{runs[0].model:10} {ranks} ranks, stages {runs[0].stages}: {len(runs) - len(bad)} of "
                f"{len(runs)} exact, worst error {max(numbers, default=float('nan')):.1e}, {seconds:.0f} s",
                flush=True,
            )
            for run, outcome in bad:
                print(f"    {run}\n        {outcome}", flush=True)
            if chosen.json is not None:
                _write(chosen.json, runs, outcomes)
    finally:
        pool.close()
    print(f"{count - failed} of {count} runs exact, {len(BATCHES)} batch sizes each, worst error {worst:.1e}")
    return 1 if failed else 0


def _outcomes(pool: RankPool, ranks: int, runs: tuple[Run, ...], timeout: float) -> list[float | str]:
    """The worst of all ranks for each run, or an error's text."""
    try:
        found = pool.run(ranks, outcomes_of, runs, timeout=timeout)
    except RankError as error:
        return [str(error)] * len(runs)
    return [_worst(row) for row in zip(*found, strict=True)]


def _worst(row: Sequence[float | str]) -> float | str:
    texts = [value for value in row if isinstance(value, str)]
    return texts[0] if texts else max(value for value in row if isinstance(value, float))


def _passes(outcome: float | str) -> bool:
    return isinstance(outcome, float) and outcome <= LIMIT


def _write(path: Path, runs: Sequence[Run], outcomes: Sequence[float | str]) -> None:
    with path.open("a") as file:
        for run, outcome in zip(runs, outcomes, strict=True):
            file.write(json.dumps({"run": str(run), "outcome": outcome}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
