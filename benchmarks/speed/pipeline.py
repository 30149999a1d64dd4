"""Pipelines on two ranks or more: fxdp beside torch.distributed.pipelining and plain data parallelism.

    python -m benchmarks.speed.pipeline            # everything, about half an hour on 2 cores
    python -m benchmarks.speed.pipeline --kinds eager --rounds 6
    python -m benchmarks.speed.pipeline --network  # between two hosts of 1 Gbit/s, as root
    python -m benchmarks.speed.pipeline --network 100 --ranks 4 --model gpt-untied-8 --kinds eager

With `interleaved` a rank has two stages, else one. Torch's own zero-bubble schedule takes no compiled stages.

All ways take turns in one pair of processes with one thread each, on the same global batch, so that a busy
machine is equally busy for all. A step is forward and backward, no optimizer; each rank keeps the gradients
of its own stage. Before anything is timed, all losses and gradients are compared with one device's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness.processes import launch
from benchmarks.speed.pipeline_contenders import KINDS, SCHEDULES, names
from benchmarks.speed.pipeline_show import draw, show
from tests.hosts.machines import machines, why_not

CONSOLE = Console(width=max(Console().width, 140))


def main() -> int:
    asked = _arguments()
    if asked.network is not None and (reason := why_not()):
        CONSOLE.print(f"no hosts: {reason}")
        return 2
    wanted = names(asked.microbatches, asked.ways, asked.kinds)
    where = "" if asked.network is None else f", {asked.network:g} Mbit/s between hosts"
    with tempfile.TemporaryDirectory(prefix="fxdp-bench-") as folder:
        answer = Path(folder) / "answer.json"
        question = {
            "model": asked.model,
            "names": [astuple(n) for n in wanted],
            "rounds": asked.rounds,
            "steps": asked.steps,
            "answer": str(answer),
        }
        command = [sys.executable, "-m", "benchmarks.speed.pipeline_rank", json.dumps(question)]
        if failed := _on_ranks(command, asked):
            return failed
        results: dict[str, Any] = json.loads(answer.read_text())
    svgs = {name: schedule.pop("svg") for name, schedule in results["schedules"].items()}
    results["machine"] = {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "model": asked.model,
        "where": f"{asked.ranks} ranks{where}",
    }
    asked.json.write_text(json.dumps(results, indent=1))
    asked.schedules.mkdir(parents=True, exist_ok=True)
    for name, svg in svgs.items():
        (asked.schedules / f"{name.replace(',', '').replace(' ', '-')}.svg").write_text(svg)
    draw(results, asked.plot)
    show(results, CONSOLE)
    CONSOLE.print(f"figures: {asked.json}, plot: {asked.plot}, schedules: {asked.schedules}", highlight=False)
    return 0


def _on_ranks(command: list[str], asked: argparse.Namespace) -> int:
    """Run a command on each rank, each on a host of its own if there is a network; the exit code."""
    environment = {"OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        if asked.network is not None:
            made = stack.enter_context(machines(asked.ranks, mbit=asked.network))
            command = made.of_rank(command)
            environment |= {"MASTER_ADDR": made.parent, "LOCAL_WORLD_SIZE": "1"}
        return launch(command, asked.ranks, environment=environment, timeout=asked.timeout)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("gpt-untied", "gpt-untied-8", "tiny-gpt"), default="gpt-untied")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ways", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--network", type=float, nargs="?", const=1000.0, help="Mbit/s between hosts")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each way")
    parser.add_argument("--steps", type=int, default=2, help="counted steps in a turn")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for everything")
    parser.add_argument("--json", type=Path, default=Path("pipeline.json"))
    parser.add_argument("--plot", type=Path, default=Path("pipeline.png"))
    parser.add_argument("--schedules", type=Path, default=Path("pipeline-schedules"), help="folder of SVGs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
