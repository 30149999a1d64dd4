"""The first step of a GPT, in CPU seconds of the process and those that it starts, beside `torch.compile`.

    python -m benchmarks.speed.start_up  # 6 and 24 layers, about half an hour on 2 cores
    python -m benchmarks.speed.start_up --layers 6 --rounds 1

Each start is a process of its own with one thread. A variant's first one has an empty cache (cold), the
others find what it left (warm); variants take turns, so that a busy machine is equally busy for all. The
figures are those of the first batch size, and of the second if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

VARIANTS = ("torch.compile", "fxdp", "fxdp eager")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", nargs="+", type=int, default=[6, 24])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3, help="warm starts of each variant")
    parser.add_argument("--sizes", type=int, choices=(1, 2), default=2, help="batch sizes in a start")
    parser.add_argument("--start", nargs=2, metavar=("VARIANT", "LAYERS"), help="what one process does")
    asked = parser.parse_args()
    if asked.start:
        print(json.dumps(_start(asked.start[0], int(asked.start[1]), asked.sizes)))
        return
    second = " second size, cold | warm |" if asked.sizes == 2 else ""
    print(f"| layers | variant | cold | warm |{second}")
    for layers in asked.layers:
        with tempfile.TemporaryDirectory(prefix="fxdp-start-") as folder:
            starts = [
                {variant: _ask(variant, layers, asked.sizes, Path(folder)) for variant in asked.variants}
                for _ in range(1 + asked.rounds)
            ]
        for variant in asked.variants:
            cold, *warm = (start[variant] for start in starts)
            medians = map(statistics.median, zip(*warm, strict=True))
            figures = [f"{one:.1f} | {other:.1f}" for one, other in zip(cold, medians, strict=True)]
            print("|", " | ".join([str(layers), variant, *figures]), "|", flush=True)


def _ask(variant: str, layers: int, sizes: int, folder: Path) -> list[float]:
    """CPU seconds of the first step of each batch size, in a new process."""
    cache = str(folder / variant.replace(" ", "-"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache, "FXDP_CACHE": "1"}
    command = [sys.executable, "-m", "benchmarks.speed.start_up"]
    command += ["--sizes", str(sizes), "--start", variant, str(layers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _start(variant: str, layers: int, sizes: int) -> list[float]:
    import torch

    import fxdp
    from fxdp.cli.demo.model import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(256, 128, layers=layers, width=64, heads=4))
    if variant == "torch.compile":
        compiled = torch.compile(model)
    else:
        compiled = fxdp.compile(model, backend="eager" if "eager" in variant else "inductor")
    found = []
    for size in (4, 6)[:sizes]:
        tokens = torch.randint(256, (size, 33))
        begin = _cpu_seconds()
        compiled(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
        found.append(_cpu_seconds() - begin)
    return found


def _cpu_seconds() -> float:
    """Of this process, its children and theirs, ended or not: Inductor's compilers are never waited for."""
    rows = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()  # from the third: state, parent, ...
            rows[int(stat.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    mine = {os.getpid()}
    while more := {pid for pid, (parent, _) in rows.items() if parent in mine} - mine:
        mine |= more
    return sum(rows[pid][1] for pid in mine) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
