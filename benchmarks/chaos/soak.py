"""Memory, descriptors, threads and programs of a rank over 2,000 steps of uneven and empty batches.

    python -m benchmarks.chaos.soak [--steps 2000]  # two ranks, a data axis and then two stages

Tables show what rank 0 holds after a quarter of the steps, a half, and all of them.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from tests.module.test_soak import soaked
from tests.rank_pool import RankPool


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    asked = parser.parse_args()
    pool, console = RankPool(), Console()
    try:
        for stages in (False, True):
            held = pool.run(2, soaked, stages, asked.steps, timeout=3600)[0]
            shown = Table(title="two stages" if stages else "two ranks of data", title_justify="left")
            for column in ("", *(f"step {asked.steps // part}" for part in (4, 2, 1))):
                shown.add_column(column, justify="right" if column else "left")
            for name in held[0]:
                shown.add_row(name + (", KiB" if name == "memory" else ""), *(_count(h[name]) for h in held))
            console.print(shown)
    finally:
        pool.close()
    return 0


def _count(held: int | dict[str, str]) -> str:
    return f"{held if isinstance(held, int) else len(held):,}"


if __name__ == "__main__":
    sys.exit(main())
