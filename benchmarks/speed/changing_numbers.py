"""Steps with a Python number that changes each time, beside steps whose number stays, in CPU time.

    python -m benchmarks.speed.changing_numbers
    python -m benchmarks.speed.changing_numbers --backend eager --width 256

A KL weight and the number of the step enter the loss. Both loops are one process's, in turns of ten steps;
shown are the medians of a step, in the processor's time and not the clock's, and how many programs each has.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxdp

MOST = 1.02
TURN = 10


class Weighted(nn.Module):
    """A few layers, and a loss that a weight and a step number enter."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        )

    def forward(self, x: Tensor, beta: float, step: int) -> Tensor:
        out = self.layers(x)
        return out.square().mean() + beta * out.exp().mean() / (1 + step)


def main() -> int:
    """Measure, show, and return 1 if numbers that change cost more than `MOST` times those that stay."""
    asked = _arguments()
    torch.set_num_threads(1)
    table = Table("backend", "stays, ms", "changes, ms", "ratio", "programs")
    ratios = []
    for backend in asked.backend:
        loops = {kind: _loop(asked, backend, kind == "changes") for kind in ("stays", "changes")}
        times: dict[str, list[float]] = {kind: [] for kind in loops}
        for iteration in range(asked.turns):
            for kind in ("stays", "changes") if iteration % 2 else ("changes", "stays"):
                times[kind] += loops[kind][0](TURN)
        stays, changes = (median(times[kind]) for kind in ("stays", "changes"))
        ratios.append(changes / stays)
        programs = ", ".join(str(count()) for _, count in loops.values())
        table.add_row(backend, f"{stays:.3f}", f"{changes:.3f}", f"{ratios[-1]:.3f}", programs)
    Console().print(table)
    return int(max(ratios) > MOST)


def _loop(
    asked: argparse.Namespace, backend: str, changes: bool
) -> tuple[Callable[[int], list[float]], Callable[[], int]]:
    """What runs so many steps, after the first four; and what counts its programs."""
    torch.manual_seed(0)
    model = Weighted(asked.width, asked.layers)
    compiled = fxdp.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, done = torch.randn(asked.batch, asked.width), 0

    def step() -> float:
        nonlocal done
        done += 1
        begin = time.process_time()
        number = done if changes else 1
        compiled(x, 0.001 * number, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1e3 * (time.process_time() - begin)

    for _ in range(4):
        step()
    return lambda steps: [step() for _ in range(steps)], lambda: compiled._programs.compiled


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", nargs="+", default=["eager", "inductor"])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--turns", type=int, default=60, help="of ten steps each")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
