"""What one rank of `data_kills.py` does: train from the last checkpoint on, note each step, be killed."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

import fxdp

KINDS = ("map-style", "iterable")
SAMPLES, BATCH, SAVED = 53, 8, 4


def _sample(index: int) -> tuple[Tensor, Tensor]:
    """The index, and draws of two generators; its label."""
    drawn = [random.random(), float(torch.rand(())), float(torch.randn(()))]
    return torch.tensor([index, *drawn], dtype=torch.float64), torch.tensor(index % 3)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples that draw random numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return _sample(index)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples that draw, one after another."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (_sample(index) for index in range(SAMPLES))


def train(
    folder: Path, path: Path, kind: str, strategy: str, workers: int, last: int,
    kill: tuple[int, float, int] | None,
) -> None:  # fmt: skip
    """Train up to step `last`; `kill`: after how many steps and seconds which rank (or all) is killed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).double()
    compiled = fxdp.compile(model, strategy=strategy, loss_fn=F.cross_entropy, backend="eager")
    optimizer = torch.optim.Adam(compiled.parameters(), lr=1e-3)
    if kind == "map-style":
        loader = fxdp.data_loader(Samples(), BATCH, shuffle=True, seed=3, local=True, num_workers=workers)
    else:
        loader = fxdp.data_loader(Stream(), BATCH, seed=3, local=True)
    step = fxdp.load(path, compiled, optimizer, data=loader) if path.exists() else 0
    rank, first = dist.get_rank(), step
    with (folder / f"rank{rank}").open("w", buffering=1) as written:
        while step < last:
            for x, y in loader:
                loss = compiled(x, target=y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                written.write(json.dumps([step, x[:, :3].tolist(), loss.item()]) + "\n")
                if kill and step == first + kill[0] and kill[2] in (rank, dist.get_world_size()):
                    threading.Timer(kill[1], os.kill, (os.getpid(), signal.SIGKILL)).start()
                if step % SAVED == 0:
                    fxdp.save(path, compiled, optimizer, step=step, data=loader)
                if step == last:
                    return
