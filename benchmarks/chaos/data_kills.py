"""Training that is killed at random points, and goes on with other ranks: its samples and its losses.

    python -m benchmarks.chaos.data_kills  # 20 kills, half a minute
    python -m benchmarks.chaos.data_kills --kills 5 --kind iterable --seed 1

One run is trained by a chain of processes: each has a random number of ranks (1 to 4), of loader workers (0
or 2) and a strategy (replicate or shard), takes up the last checkpoint, and is killed after some random
steps and milliseconds, one of its ranks or all: kills meet loading, sums, and the writing of checkpoints.
Every step that any of them took must have the sample ids of one device, each with its own random numbers, and
its loss to 1e-9, those that were done again, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.chaos.data_kills_rank import KINDS, train
from tests.rank_pool import RankPool

CONSOLE = Console()
EXACT = 1e-9
Steps = dict[int, tuple[list[Any], float]]
"""The global batch's samples and the loss, by step."""


def _steps(folder: Path, world: int) -> Steps:
    """Samples and loss of each step that all ranks of a process have written down."""
    ranks = []
    for rank in range(world):
        file = folder / f"rank{rank}"
        text = file.read_text() if file.exists() else ""
        rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        ranks.append({step: (samples, loss) for step, samples, loss in rows})
    full = set.intersection(*(set(rank) for rank in ranks))
    return {
        step: ([sample for rank in ranks for sample in rank[step][0]], ranks[0][step][1])
        for step in sorted(full)
    }


def _compare(found: Steps, expected: Steps) -> float:
    """The largest relative difference of losses; samples must be equal.

    Raises
    ------
    AssertionError : a step has other samples than one device, or there is no such step.
    """
    worst = 0.0
    for step, (samples, loss) in found.items():
        if step not in expected or samples != expected[step][0]:
            raise AssertionError(f"step {step}: samples {samples}, of one device {expected.get(step)}")
        worst = max(worst, abs(loss - expected[step][1]) / abs(expected[step][1]))
    return worst


def main() -> int:
    """Kill and go on; 1 if a step differs from one device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kind", choices=KINDS, default="map-style")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    drawn, worst, seen, again = random.Random(asked.seed), 0.0, set[int](), 0
    last = 14 * asked.kills
    with contextlib.closing(RankPool()) as pool, tempfile.TemporaryDirectory() as folder:
        alone = Path(folder, "alone")
        alone.mkdir()
        (one,) = pool.spawn(1, train, alone, alone / "run", asked.kind, "replicate", 0, last, None)
        expected = _steps(alone, 1)
        assert one.status == 0, one.output
        assert list(expected) == list(range(1, last + 1))
        kills = number = 0
        while last not in seen:
            number += 1
            world, strategy = drawn.randint(1, 4), drawn.choice(("replicate", "shard"))
            workers = drawn.choice((0, 2))
            kill = (drawn.randint(1, 20), drawn.uniform(0, 0.05), drawn.randrange(world + 1))
            phase = Path(folder, str(number))
            phase.mkdir()
            outcomes = pool.spawn(
                world, train, phase, Path(folder, "run"), asked.kind, strategy, workers, last,
                kill if kills < asked.kills else None,
            )  # fmt: skip
            killed = -signal.SIGKILL in [outcome.status for outcome in outcomes]
            kills += killed
            if not killed and any(outcome.status for outcome in outcomes):
                raise AssertionError("\n".join(outcome.output for outcome in outcomes))
            found = _steps(phase, world)
            difference = _compare(found, expected)
            worst, again = max(worst, difference), again + len(seen & set(found))
            seen |= set(found)
            CONSOLE.print(
                f"{number}: {world} ranks, {strategy}, {workers} workers, steps {min(found, default='-')} to "
                f"{max(found, default='-')}, {'killed' if killed else 'ended'}; losses to {difference:.0e}"
            )
    missing = set(expected) - seen
    CONSOLE.print(
        f"{asked.kind}: {kills} kills, {last} steps, {again} of them done again; samples are one device's, "
        f"losses differ by at most {worst:.0e}; steps that no process did: {sorted(missing)}"
    )
    return int(worst > EXACT or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
