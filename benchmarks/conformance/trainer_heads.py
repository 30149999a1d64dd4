"""Heads of transformers through Trainer on two ranks, beside plain Trainer on one device.

    python -m benchmarks.conformance.trainer_heads [head ...] [--float32] [--inductor] [--unpadded]
    python -m benchmarks.conformance.trainer_heads [head ...] --script [--casts] [--epsilon 1e-3]

Each head trains 6 steps of 4 samples, of which the last batch of an epoch has one, and is evaluated after
three and six steps. All that Trainer logs and all parameters at the end are compared: a line a head, with
how many numbers there were and the largest difference of each kind. Losses are sums in float32 in Trainer
itself. `--unpadded`: without `pad=`, where each rank's sentences are as long as its own longest one.

`--script`: `heads_script.py`, which knows of no ranks, by `fxdp run --nproc 2`; beside it on one device with
the samples of each batch in three other orders, which changes nothing but rounding. Both are the largest
difference of a number that Trainer logs, relative to it. `--casts`: with the models' own casts to float32.
`--epsilon`: AdamW's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from benchmarks.conformance.scripts.__main__ import difference
from tests.integrations.head_runs import Run, compared, trained
from tests.integrations.heads import HEADS
from tests.rank_pool import RankError, RankPool

KINDS = ("loss", "grad_norm", "evaluation", "parameters")


def line(
    pool: RankPool, name: str, folder: str, dtype: torch.dtype, options: dict[str, Any], pads: bool
) -> str:
    """What is found of one head."""
    began = time.perf_counter()
    try:
        one: Run = pool.run(1, trained, name, f"{folder}/one", dtype, timeout=200)[0]
        runs: list[Run] = pool.run(2, trained, name, f"{folder}/two", dtype, options, pads, timeout=500)
    except RankError as error:
        return f"refused: {_last_words(str(error))}"
    found = [compared(one, run) for run in runs]
    count = sum(found[0].counts.values())
    worst = {kind: max(x.largest.get(kind, 0.0) for x in found) for kind in KINDS}
    said = "" if runs[0].problem_type == one.problem_type else f"  problem_type {runs[0].problem_type}"
    cells = " ".join(f"{worst[kind]:>10.1e}" for kind in KINDS)
    return f"{count:>7} {cells} {time.perf_counter() - began:>6.0f} s{said}"


def _last_words(text: str) -> str:
    lines = [words.strip() for words in text.splitlines() if words.strip()]
    return next((words for words in lines if "Error: " in words and not words.startswith("File")), lines[0])


def by_script(heads: Sequence[str], options: Sequence[str]) -> None:
    """Print a line for each head: how far two ranks are from one device, and one device from itself."""
    script = ["-m", "benchmarks.conformance.heads_script", *heads, *options]
    one, two = _printed(script), _printed(["-m", "fxdp", "run", "--nproc", "2", *script])
    others = [_printed([*script, "--order", str(seed)]) for seed in (1, 2, 3)]
    print("| head | numbers | 2 ranks | one device, other orders |\n|---|---|---|---|")
    for name in heads:
        ours, *rest = (_lines_of(name, printed) for printed in (one, two, *others))
        by_ranks, *by_order = (difference(ours, printed)[0] for printed in rest)
        print(f"| {name} | {_count(ours)} | {by_ranks:.1e} | {max(by_order):.1e} |", flush=True)


def _printed(command: Sequence[str]) -> str:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, *command], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def _lines_of(name: str, printed: str) -> str:
    return "\n".join(line for line in printed.splitlines() if line.startswith(f"{name}:"))


def _count(printed: str) -> int:
    return sum(len(line.partition(": ")[2].split()) // 2 for line in printed.splitlines())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("heads", nargs="*", help=f"of {', '.join(HEADS)} (default: all)")
    parser.add_argument("--float32", action="store_true", help="not float64")
    parser.add_argument("--inductor", action="store_true", help="compiled")
    parser.add_argument("--unpadded", action="store_true", help="without `pad=`")
    parser.add_argument("--script", action="store_true", help="by `fxdp run`")
    parser.add_argument("--casts", action="store_true", help="with --script: casts to float32 stay")
    parser.add_argument("--epsilon", default="1e-8", help="with --script: AdamW's")
    asked = parser.parse_args()
    if unknown := set(asked.heads) - HEADS.keys():
        parser.error(f"no heads {sorted(unknown)}; there are {', '.join(HEADS)}")
    if asked.script:
        casts = ["--casts"] if asked.casts else []
        by_script(asked.heads or list(HEADS), [*casts, "--epsilon", asked.epsilon])
        return
    dtype = torch.float32 if asked.float32 else torch.float64
    options = {} if asked.inductor else {"backend": "eager"}
    backend = options.get("backend", "inductor")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {dtype}, {backend}")
    print(f"{'':20} {'numbers':>7} " + " ".join(f"{kind:>10}" for kind in KINDS), flush=True)
    with contextlib.closing(RankPool()) as pool, tempfile.TemporaryDirectory() as folder:
        for name in asked.heads or HEADS:
            found = line(pool, name, folder, dtype, options, not asked.unpadded)
            print(f"{name:20} {found}", flush=True)


if __name__ == "__main__":
    main()
