"""Savers that are killed at random moments: `fxdp.load` finds the checkpoint before, or the new one, full.

    python -m benchmarks.chaos.checkpoint_kills  # 50 kills of two ranks, some minutes
    python -m benchmarks.chaos.checkpoint_kills --kills 5

Two ranks save on and on, every value of the model the number of its step, until one of them, or both, are
killed. What is loaded then must have one number in all values, and be of the step that it says.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

import fxdp
from benchmarks.chaos.checkpoint_kills_rank import RANKS, fill, save_until_killed, small_model
from tests.rank_pool import RankPool

CONSOLE = Console()


def _found(path: Path, compiled: fxdp.CompiledModule) -> int:
    """The step that is there; every value must be of it."""
    step = fxdp.load(path, compiled)
    if not all(bool((p == step).all()) for p in compiled.parameters()):
        raise AssertionError(f"the checkpoint of step {step} has other values")
    return step


def main() -> int:
    """Kill and load; 1 if a checkpoint is lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    drawn, lost = random.Random(asked.seed), 0
    with contextlib.closing(RankPool()) as pool, tempfile.TemporaryDirectory() as folder:
        path, compiled = Path(folder) / "run", small_model()
        fill(compiled, 0)
        fxdp.save(path, compiled)
        moved, half = 0, 0
        for number in range(asked.kills):
            before = _found(path, compiled)
            seconds, killed = drawn.uniform(0, 0.4), drawn.randrange(RANKS + 1)
            outcomes = pool.spawn(RANKS, save_until_killed, path, seconds, killed, init=True)
            if -signal.SIGKILL not in [outcome.status for outcome in outcomes]:
                raise AssertionError(f"kill {number}: nobody was killed: {outcomes}")
            writing = path.with_name("run.new").exists() or not path.exists()
            half += writing
            try:
                after = _found(path, compiled)
                moved += after > before
                CONSOLE.print(f"kill {number}: step {before} -> {after}{', in a write' if writing else ''}")
            except (fxdp.FxdpError, AssertionError) as error:
                lost += 1
                CONSOLE.print(f"kill {number} after {seconds:.3f} s: {error}", style="red")
    CONSOLE.print(
        f"{asked.kills} kills, {half} in the midst of writing: {moved} left a newer checkpoint than they "
        f"began with, {asked.kills - moved - lost} that one, {lost} none"
    )
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
