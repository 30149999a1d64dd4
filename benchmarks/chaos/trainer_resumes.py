"""Runs by Trainer, Accelerate and Lightning that stop in the midst of an epoch, and go on with other ranks.

    python -m benchmarks.chaos.trainer_resumes  # 3 trainers, 4 changes of the number of ranks, 20 s
    python -m benchmarks.chaos.trainer_resumes lightning

Each trainer keeps the position in the data by its own hooks: Trainer by its count of steps, Accelerate by
`register_for_checkpointing(loader)`, Lightning by `state_dict` of the loader, where `loader` is
`fxdp.data_loader(...)`. The losses of all steps are compared with those of one device that was not stopped,
which another sample in any batch would change.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.chaos.trainer_resumes_rank import LAST, STOP, TRAINERS, run
from tests.rank_pool import RankPool

CONSOLE = Console()
EXACT = 1e-9
CHANGES = ((2, 1), (1, 2), (2, 3), (3, 2))


def main() -> int:
    """Stop and go on; 1 if a loss differs from one device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trainers", nargs="*", help=f"of {', '.join(TRAINERS)}; all if none is given")
    asked, wrong = parser.parse_args(), 0
    with contextlib.closing(RankPool()) as pool, tempfile.TemporaryDirectory() as root:
        for name in asked.trainers or TRAINERS:
            (expected,) = pool.run(1, run, name, str(Path(root, name)), True, LAST)
            assert len(expected) == LAST, expected
            for before, after in CHANGES:
                folder = str(Path(root, f"{name}-{before}-{after}"))
                found = pool.run(before, run, name, folder, True, STOP)[0]
                found += pool.run(after, run, name, folder, False, LAST)[0]
                errors = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
                wrong += max(errors) > EXACT
                ranks = f"{before} ranks, then {after} after step {STOP} of {LAST}"
                CONSOLE.print(f"{name}, {ranks}: losses to {max(errors):.0e}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
