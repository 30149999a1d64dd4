"""Steps between hosts: fxdp beside DDP over a network of a given speed, on one machine as root.

    python -m benchmarks.speed.network  # 1000 and 100 Mbit/s, about ten minutes
    python -m benchmarks.speed.network --models mlp --mbit 1000 --rounds 5

Each host is a network namespace with one rank of one thread; ranks share no memory. Two hosts on two cores
leave none to the network's own threads, as real hosts would. All variants take turns in one pair of
processes, and `compile`, which sends nothing, shows what a step costs without a network.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.harness.models import CASES
from benchmarks.harness.processes import launch
from benchmarks.speed.variants import VARIANTS
from tests.hosts.machines import Machines, machines, why_not

CONSOLE = Console(width=max(Console().width, 100))
DEFAULT = ("compile", "ddp", "ddp-compile", "fxdp")
RIVALS = ("ddp", "ddp-compile")


def main() -> int:
    asked = _arguments()
    if reason := why_not():
        CONSOLE.print(f"no hosts: {reason}")
        return 2
    for mbit in asked.mbit:
        for name in asked.models:
            with machines(asked.hosts, mbit=mbit) as made, tempfile.TemporaryDirectory() as folder:
                seconds = _measured(name, asked, made, Path(folder))
            if seconds is None:
                return 1
            CONSOLE.print(_table(f"{name}, {asked.hosts} hosts, {mbit:g} Mbit/s", seconds))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=tuple(CASES), default=["gpt", "resnet", "mlp"])
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(DEFAULT))
    parser.add_argument("--mbit", nargs="+", type=float, default=[1000.0, 100.0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=4, help="counted steps in a turn")
    return parser.parse_args()


def _measured(
    name: str, asked: argparse.Namespace, made: Machines, folder: Path
) -> dict[str, list[float]] | None:
    """Seconds of each variant's steps, on the slowest host."""
    answer = folder / "answer.json"
    question = {
        "what": "rounds", "model": name, "variants": asked.variants, "rounds": asked.rounds,
        "steps": asked.steps, "device": "cpu", "answer": str(answer),
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.speed.step_rank", json.dumps(question)]
    own = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    own |= {"MASTER_ADDR": made.parent, "LOCAL_WORLD_SIZE": "1"}
    failed = launch(made.of_rank(command), asked.hosts, environment=own, timeout=1800)
    return None if failed else json.loads(answer.read_text())


def _table(title: str, seconds: dict[str, list[float]]) -> Table:
    shown = Table(title=title, title_justify="left")
    for column in ("variant", "least, ms", "median, ms", "least x", "median x"):
        shown.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    rivals = [times for variant, times in seconds.items() if variant in RIVALS]
    for variant, times in seconds.items():
        row = [f"{least(times) * 1e3:.1f}" for least in (min, median)]
        if rivals:
            row += [f"{least(times) / min(map(least, rivals)):.3f}" for least in (min, median)]
        shown.add_row(variant, *row)
    shown.caption = "x: times the better of DDP and DDP + torch.compile"
    return shown


if __name__ == "__main__":
    sys.exit(main())
