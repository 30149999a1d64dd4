"""Pipelines of two stages on two ranks: fxdp beside torch.distributed.pipelining and plain data parallelism.

    python benchmarks/pipeline.py                        # everything, about half an hour on 2 cores
    python benchmarks/pipeline.py --kinds eager --rounds 6

All ways take turns in one pair of processes with one thread each, on the same global batch, so that a busy
machine is equally busy for all. A step is forward and backward, no optimizer; each rank keeps the gradients
of its own stage. Before anything is timed, all losses and gradients are compared with one device's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from pipeline_contenders import KINDS, names
from pipeline_show import draw, show
from processes import launch
from rich.console import Console

CONSOLE = Console(width=max(Console().width, 140))
RANKS = 2


def main() -> int:
    asked = _arguments()
    wanted = [n for n in names(asked.microbatches) if n.kind in asked.kinds]
    with tempfile.TemporaryDirectory(prefix="fxdp-bench-") as folder:
        answer = Path(folder) / "answer.json"
        question = {
            "model": asked.model,
            "names": [astuple(n) for n in wanted],
            "rounds": asked.rounds,
            "steps": asked.steps,
            "answer": str(answer),
        }
        command = [sys.executable, str(Path(__file__).with_name("pipeline_measure.py")), json.dumps(question)]
        environment = {"OMP_NUM_THREADS": "1"}
        failed = launch(command, RANKS, environment=environment, timeout=asked.timeout)
        if failed:
            return failed
        results: dict[str, Any] = json.loads(answer.read_text())
    svgs = {name: schedule.pop("svg") for name, schedule in results["schedules"].items()}
    results["machine"] = {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "model": asked.model,
    }
    asked.json.write_text(json.dumps(results, indent=1))
    asked.schedules.mkdir(parents=True, exist_ok=True)
    for name, svg in svgs.items():
        (asked.schedules / f"{name.replace(',', '').replace(' ', '-')}.svg").write_text(svg)
    draw(results, asked.plot)
    show(results, CONSOLE)
    CONSOLE.print(f"figures: {asked.json}, plot: {asked.plot}, schedules: {asked.schedules}", highlight=False)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("gpt-untied", "tiny-gpt"), default="gpt-untied")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=10, help="turns of each way")
    parser.add_argument("--steps", type=int, default=2, help="counted steps in a turn")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for everything")
    parser.add_argument("--json", type=Path, default=Path("pipeline.json"))
    parser.add_argument("--plot", type=Path, default=Path("pipeline.png"))
    parser.add_argument("--schedules", type=Path, default=Path("pipeline-schedules"), help="folder of SVGs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
