"""How fast fxdp's own passes are, and whether their time grows with the graph alone.

    python -m benchmarks.speed.pass_speed  # GPT-2 of 12, 24 and 48 layers, d 64

Capture, joint export and Inductor are not counted: only the passes between them. No process group is
needed, the mesh is virtual.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fxdp.capture.driver import capture_request
from fxdp.capture.inputs import read_inputs
from fxdp.capture.joint.raw_joint import JointOptions
from fxdp.capture.request import Request
from fxdp.cli.demo.model import GPT, GPTConfig
from fxdp.compiler.prepare import prepare
from fxdp.ir.types.mesh import mesh_of
from fxdp.options import Options

WANTED_NODES_PER_SECOND = 5_000
WANTED_LINEARITY = 0.10


@dataclass(frozen=True)
class Speed:
    """The passes over one model; `seconds` is the best of several runs."""

    layers: int
    nodes: int
    seconds: float
    timings: dict[str, float]

    @property
    def rate(self) -> float:
        return self.nodes / self.seconds


def measure(layers: int) -> Speed:
    """Compile one model without lowering it."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=256, length=32, layers=layers, width=64, heads=2))
    tokens = torch.zeros(4, 32, dtype=torch.long)
    inputs = read_inputs(model, (tokens, tokens), {})
    captured = capture_request(Request(model, inputs, joint=JointOptions("all")))
    nodes = len(captured.gm.graph.nodes)
    gc.collect()  # the garbage of the capture is not the passes' work
    seconds = prepare(captured, mesh_of({"dp": 2}, "cpu"), Options(), 64).seconds
    return Speed(layers, nodes, sum(seconds.values()), seconds)


def fastest(sizes: Sequence[int], repeats: int) -> list[Speed]:
    """The fastest run of each size; sizes take turns, so that a machine that slows down does so for all."""
    runs = [[measure(layers) for layers in sizes] for _ in range(repeats)]
    return [min(of_one_size, key=lambda run: run.seconds) for of_one_size in zip(*runs, strict=True)]


def main() -> int:
    """Measure, show, and return 1 if a figure is not reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    speeds = fastest(asked.layers, asked.repeats)
    if asked.json:
        asked.json.write_text(json.dumps([asdict(speed) for speed in speeds], indent=1))
    return _show(speeds)


def _show(speeds: list[Speed]) -> int:
    names = list(speeds[0].timings)
    table = Table(title="fxdp's own passes, verification included", caption="ms per pass in the last columns")
    for column in ("layers", "nodes", "seconds", "nodes/s", "per node, x first", *names):
        table.add_column(column, justify="right")
    growth = [speeds[0].rate / speed.rate for speed in speeds]
    for speed, ratio in zip(speeds, growth, strict=True):
        figures = (f"{speed.nodes:,}", f"{speed.seconds:.2f}", f"{speed.rate:,.0f}", f"{ratio:.2f}")
        table.add_row(str(speed.layers), *figures, *(f"{speed.timings[name] * 1000:.0f}" for name in names))
    fast = min(speed.rate for speed in speeds) >= WANTED_NODES_PER_SECOND
    linear = max(growth) <= 1 + WANTED_LINEARITY
    console = Console(width=max(Console().width, 140))
    console.print(table)
    console.print(f"at least {WANTED_NODES_PER_SECOND:,} nodes/s: {'yes' if fast else 'NO'}")
    console.print(f"linear within {WANTED_LINEARITY:.0%}: {'yes' if linear else 'NO'}")
    return 0 if fast and linear else 1


if __name__ == "__main__":
    sys.exit(main())
