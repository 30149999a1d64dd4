"""Step time, first step, memory, bytes sent and losses of fxdp beside DDP, in one run on the same ranks.

    python -m benchmarks.speed.step_time  # everything, about half an hour on 2 cores
    python -m benchmarks.speed.step_time --models mlp --rounds 5 --variants ddp ddp-compile fxdp

Each rank has one thread. A variant is first measured alone, in fresh processes and with an empty Inductor
cache; then all variants take turns in one pair of processes, so that a busy machine is equally busy for all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness.models import CASES
from benchmarks.harness.processes import launch
from benchmarks.speed.step_show import draw, table
from benchmarks.speed.variants import COMPILING, FULL, VARIANTS

CONSOLE = Console(width=max(Console().width, 125))
DEFAULT = ("eager", "ddp", "ddp-compile", "fxdp-eager", "fxdp")


def main() -> int:
    asked = _arguments()
    results: dict[str, Any] = {"machine": _machine(asked), "models": {}}
    for name in asked.models:
        with tempfile.TemporaryDirectory(prefix="fxdp-bench-") as folder:
            results["models"][name] = _measure(name, asked, Path(folder))
        CONSOLE.print(table(name, results["models"][name]))
        asked.json.write_text(json.dumps(results, indent=1))  # what is done is kept if the rest fails
    draw(results, asked.plot)
    CONSOLE.print(f"figures: {asked.json}, plot: {asked.plot}", highlight=False)
    failed = any(not figures["first"] for model in results["models"].values() for figures in model.values())
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=tuple(CASES), default=["gpt", "resnet", "mlp"])
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(DEFAULT))
    parser.add_argument("--rounds", type=int, default=12, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=4, help="counted steps in a turn")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, default=Path("step-time.json"))
    parser.add_argument("--plot", type=Path, default=Path("step-time.png"))
    return parser.parse_args()


def _measure(name: str, asked: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """All figures of one model, by variant; a variant that fails has no figures."""
    found: dict[str, dict[str, Any]] = {}
    for variant in (FULL, *asked.variants):
        CONSOLE.print(f"{name}: {variant}, first step from a cold cache", style="dim")
        question = {"what": "first", "model": name, "variant": variant}
        found[variant] = {"first": _ask(question, asked, folder, folder / f"cache-{variant}"), "seconds": []}
    warm = folder / "cache"
    for variant in COMPILING:
        if (folder / f"cache-{variant}").exists():
            shutil.copytree(folder / f"cache-{variant}", warm, dirs_exist_ok=True)
    ready = [variant for variant in asked.variants if found[variant]["first"]]
    CONSOLE.print(f"{name}: {asked.rounds} rounds of {', '.join(ready)}", style="dim")
    question = {
        "what": "rounds",
        "model": name,
        "variants": ready,
        "rounds": asked.rounds,
        "steps": asked.steps,
    }
    for variant, seconds in (_ask(question, asked, folder, warm) or {}).items():
        found[variant]["seconds"] = seconds
    return found


def _ask(question: dict[str, Any], asked: argparse.Namespace, folder: Path, cache: Path) -> Any:
    """The answer of `step_rank.py` on all ranks, or None if it fails."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    words = json.dumps({**question, "device": asked.device, "answer": str(answer)})
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "benchmarks.speed.step_rank", words]
    failed = launch(command, asked.ranks, environment=environment, timeout=1800)
    return None if failed else json.loads(answer.read_text())


def _machine(asked: argparse.Namespace) -> dict[str, Any]:
    cuda = asked.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ranks": asked.ranks,
    }


if __name__ == "__main__":
    sys.exit(main())
