"""A training step with `fxdp.Bitwise` beside the step without blocks, of one rank.

    python -m benchmarks.speed.bitwise [--backend inductor] [--blocks 1 2 4] [--rounds 15]

Two GPT layers of 256 with 128 tokens and 8 samples, AdamW included, on one thread. Ways run in turn in one
process; CPU seconds and wall seconds are medians, with their ratios to the step without blocks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp

WIDTH, HEADS, TOKENS, SAMPLES, WORDS = 256, 4, 128, 8, 256


class Layer(nn.Module):
    """Attention and two linear layers, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        joined = self.qkv(self.before(x)).split(WIDTH, 2)
        heads = [t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in joined]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """A small language model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers, self.head = nn.Sequential(Layer(), Layer()), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.words(ids))).flatten(0, 1), ids.flatten())


def _stepping(block: int | None, backend: str) -> Callable[[], None]:
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (SAMPLES, TOKENS))
    compiled = fxdp.compile(GPT(), numerics=fxdp.Bitwise(block=block), backend=backend)
    optimizer = torch.optim.AdamW(compiled.parameters(), 1e-3)

    def step() -> None:
        compiled(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    return step


def main() -> None:
    """Time all ways in turn, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ways = {block: _stepping(block, asked.backend) for block in (None, *asked.blocks)}
    seconds: dict[int | None, list[tuple[float, float]]] = {block: [] for block in ways}
    for _ in range(asked.rounds):
        for block, step in ways.items():
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            seconds[block].append((time.process_time() - cpu, time.perf_counter() - wall))
    middle = {block: [median(times) for times in zip(*rows, strict=True)] for block, rows in seconds.items()}
    table = Table("block", "CPU s", "ratio", "wall s", "ratio", title=f"backend={asked.backend}")
    for block, times in middle.items():
        cells = [str(block)]
        for own, plain in zip(times, middle[None], strict=True):
            cells += [f"{own:.4f}", f"{own / plain:.2f}"]
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
