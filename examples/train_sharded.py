"""Sharded training that is killed, and goes on with another number of ranks on the same curve.

    torchrun --nproc-per-node 4 examples/train_sharded.py --kill-after 25
    torchrun --nproc-per-node 2 examples/train_sharded.py --resume

Every rank holds its rows of parameters, gradients and AdamW's state. Each tenth step is saved; the first run
kills itself without a word, and the second takes up the last step that was saved: it prints the losses that
the first one would have printed.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import fxdp


def make_model() -> nn.Module:
    """A classifier for images of 8x8."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), *hidden, nn.Linear(128, 10))


def batch_of(step: int, images: torch.Tensor) -> torch.Tensor:
    """Which images a step is about: its number alone says it, so it is all that must be kept of the data."""
    return torch.randint(len(images), (100,), generator=torch.Generator().manual_seed(step))


def main() -> None:
    """Train, from the last checkpoint on if asked, and print the loss of each fifth step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--kill-after", type=int, default=-1, metavar="STEP")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    asked = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    compiled = fxdp.compile(make_model(), loss_fn=F.cross_entropy, strategy="shard", backend=asked.backend)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=2e-3)
    path, first = asked.folder / "digits", 0
    if asked.resume:
        first = fxdp.load(path, compiled, optimizer)
        if rank == 0:
            print(f"going on after step {first} with {ranks} ranks")
    for step in range(first + 1, asked.steps + 1):
        mine = batch_of(step, images).tensor_split(ranks)[rank]
        loss = compiled(images[mine], target=labels[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if step % 10 == 0:
            fxdp.save(path, compiled, optimizer, step=step)
        if step == asked.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
