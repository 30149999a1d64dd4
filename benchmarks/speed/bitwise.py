"""A training step with `fxdp.Bitwise` beside the step without blocks, of one rank.

    python -m benchmarks.speed.bitwise [--model resnet] [--backend inductor] [--blocks 1 2 4] [--rounds 15]

A GPT of six layers of 256 with 128 tokens and 8 samples, or a ResNet of six residual blocks with 16 images of
32 x 32; AdamW included, on one thread. Ways run in turn in one process; CPU seconds and wall seconds are
medians, with their ratios to the step without blocks. `first` is the CPU time of the first step, kernels
included (caches on disk decide much of it: name an empty folder in TORCHINDUCTOR_CACHE_DIR, and one block,
for a cold one); `peak` is what a step holds beside what is there before it, as torch's allocator counts it.
"""

from __future__ import annotations

import argparse
import resource
import time
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

import fxdp
from benchmarks.harness.models import CASES
from tests.held_memory import peak_of

SAMPLES = {"gpt": 8, "resnet": 16}


class Way:
    """A model with blocks of so many samples, or without."""

    def __init__(self, name: str, block: int | None, backend: str) -> None:
        case = CASES[name]
        self._batch = case.batch(0, SAMPLES[name] // case.local_batch)
        model = case.model(torch.device("cpu"))
        self._compiled = fxdp.compile(model, numerics=fxdp.Bitwise(block=block), backend=backend)
        self._optimizer = torch.optim.AdamW(self._compiled.parameters(), 1e-3)
        self.seconds: list[tuple[float, float]] = []
        began = _processor()
        self.step()
        self.first = _processor() - began
        self.step()
        self.peak = peak_of(self.step)

    def step(self) -> None:
        """Make one step."""
        self._compiled(*self._batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def timed(self) -> None:
        """Make one step, and note its seconds."""
        cpu, wall = time.process_time(), time.perf_counter()
        self.step()
        self.seconds.append((time.process_time() - cpu, time.perf_counter() - wall))

    def figures(self) -> list[float]:
        """Return the medians of CPU and wall seconds, the first step's CPU seconds, and the peak in MiB."""
        return [*(median(times) for times in zip(*self.seconds, strict=True)), self.first, self.peak / 2**20]


def _processor() -> float:
    """Return the CPU seconds of this process and of the compilers that it has started."""
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))


def main() -> None:
    """Time all ways in turn, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SAMPLES, default="gpt")
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ways = {block: Way(asked.model, block, asked.backend) for block in (None, *asked.blocks)}
    for _ in range(asked.rounds):
        for way in ways.values():
            way.timed()
    plain = ways[None].figures()
    heads = [word for unit in ("CPU s", "wall s", "first CPU s", "peak MiB") for word in (unit, "ratio")]
    table = Table("block", *heads, title=f"{asked.model}, backend={asked.backend}")
    for block, way in ways.items():
        pairs = zip(way.figures(), plain, strict=True)
        table.add_row(str(block), *(cell for own, of in pairs for cell in (f"{own:.4g}", f"{own / of:.2f}")))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
