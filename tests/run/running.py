"""Run scripts by `fxdp run` and by Python alone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.limits import HANG_S

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """A program that has ended."""

    code: int
    out: str
    err: str


def run(command: list[str], text: str = "") -> Ended:
    """Run Python with these arguments and this text as standard input."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *command]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=HANG_S, env=environment
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@cache
def on_one_device(script: Path, *arguments: str, text: str = "") -> Ended:
    """What the script does on one device."""
    return run([str(script), *arguments], text)


def on_ranks(
    nproc: int, script: Path, *arguments: str, options: tuple[str, ...] = (), text: str = ""
) -> Ended:
    """What it does on several ranks."""
    return run(["-m", "fxdp", "run", "--nproc", str(nproc), *options, str(script), *arguments], text)
