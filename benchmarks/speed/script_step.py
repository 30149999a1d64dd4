"""A step of an unedited script by `fxdp run`, beside the same script edited by hand for `fxdp.compile`.

    python -m benchmarks.speed.script_step --models gpt resnet --turns 3

Loader, loss and optimizer are the script's, outside of the module; by hand the loss is `loss_fn=`. Both
compile through Inductor, on two ranks, in turns. A figure is the median over the last half of all steps, by
when every kind of call is compiled; `start` is from the command to the script's first line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

_RANK = Path(__file__).with_name("script_step_rank.py")
_WAYS = {
    "fxdp run": ["-m", "fxdp", "run", "--nproc", "2", "--compile-from", "3"],
    "by hand": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-ranks-filter", "0"],
}


def main() -> int:
    """Measure, and show each model's two ways and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["gpt", "resnet"])
    parser.add_argument("--turns", type=int, default=3, help="of each way")
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    table = Table("model", "way", "step", "CPU a step", "start", "last loss")
    for model in asked.models:
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
        for _ in range(asked.turns):
            for way in _WAYS:
                found[way].append(_measure(way, model, asked.steps))
        for way, runs in found.items():
            step, used, start = (median(run[key] for run in runs) for key in ("step", "used", "start"))
            times = f"{step * 1e3:.1f} ms", f"{used * 1e3:.1f} ms", f"{start:.2f} s"
            table.add_row(model, way, *times, f"{runs[-1]['loss']:.9g}")
        ratios = [
            median(run[key] for run in found["fxdp run"]) / median(run[key] for run in found["by hand"])
            for key in ("step", "used")
        ]
        table.add_row("", "ratio", *(f"{ratio:.3f}" for ratio in ratios))
    Console().print(table)
    return 0


def _measure(way: str, model: str, steps: int) -> dict[str, Any]:
    words = [str(_RANK), model, str(steps), *(["--by-hand"] if way == "by hand" else [])]
    paths = os.pathsep.join([str(_RANK.parents[2]), os.environ.get("PYTHONPATH", "")])
    began = time.time()
    done = subprocess.run(
        [sys.executable, *_WAYS[way], *words], capture_output=True, text=True, timeout=1200, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{way}, {model} failed:\n{done.stderr}")
    said: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            said |= json.loads(line)
    half = len(said["seconds"]) // 2
    step, used = (median(said[key][half:]) for key in ("seconds", "processor"))
    return {"step": step, "used": used, "start": said["began"] - began, "loss": said["loss"]}


if __name__ == "__main__":
    sys.exit(main())
