"""Savers that are killed at random moments: `fxdp.load` finds the checkpoint before, or the new one, whole.

    python benchmarks/checkpoint_kills.py                  # 50 kills of two ranks, some minutes
    python benchmarks/checkpoint_kills.py --kills 5

Two ranks save on and on, every value of the model the number of its step, until one of them, or both, are
killed. What is loaded then must have one number in all values, and be of the step that it says.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

import fxdp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.rank_pool import RankPool

CONSOLE = Console()
RANKS = 2


def _model() -> fxdp.CompiledModule:
    torch.manual_seed(0)
    return fxdp.compile(nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 2)), strategy="shard")


def _fill(compiled: fxdp.CompiledModule, step: int) -> None:
    with torch.no_grad():
        for parameter in compiled.parameters():
            parameter.fill_(step)


def save_until_killed(path: Path, seconds: float, killed: int) -> None:
    """On one rank: save on and on; so many seconds after the first save is begun be killed, if it is this."""
    compiled = _model()
    step = fxdp.load(path, compiled)
    if killed in (dist.get_rank(), RANKS):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        step += 1
        _fill(compiled, step)
        fxdp.save(path, compiled, step=step)


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
        path, compiled = Path(folder) / "run", _model()
        _fill(compiled, 0)
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
