"""Training that survives killed ranks and lost hosts: torchrun starts it again, on the ranks that are left.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_elastic.py --kill-after 13

    # on each host; any of them but the first, which has the store, may be lost
    torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d \\
        --rdzv-endpoint FIRST_HOST:29400 examples/train_elastic.py --folder /shared/checkpoints

A rank that fails is an error on all others within seconds; each torchrun sees its ranks end, meets those of
the other hosts that are still there, and runs this file again. Every fifth step is saved, and each start
takes up the last one that was saved. The number of a step alone says which samples it is about, and fxdp
computes what one device would: so the curve is the same to rounding, however often and on however many ranks
it was begun again.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp

BATCH = 24
SAVED = 5
"""Every so many steps."""


def make_model() -> nn.Module:
    """A classifier in float64, so that rounding is far below what is printed."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)).double()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The samples of a step, those of all ranks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 16, dtype=torch.float64, generator=generator)
    return x, x[:, :4].argmax(1)


def main() -> None:
    """Train from the last checkpoint on, if there is one, and print each step's loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes longer")
    parser.add_argument("--kill-after", type=int, default=-1, metavar="STEP", help="the last rank, once")
    asked = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    starts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

    compiled = fxdp.compile(make_model(), loss_fn=F.cross_entropy, backend=asked.backend)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    path, first = asked.folder / "elastic", 0
    if path.exists():
        first = fxdp.load(path, compiled, optimizer)
    if rank == 0:
        print(f"going on after step {first} with {ranks} ranks", flush=True)
    for step in range(first + 1, asked.steps + 1):
        x, y = (part.tensor_split(ranks)[rank] for part in batch_of(step))
        loss = compiled(x, target=y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.15e}", flush=True)
        if step % SAVED == 0:
            fxdp.save(path, compiled, optimizer, step=step)
        if step == asked.kill_after and starts == 0 and rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(asked.pause)


if __name__ == "__main__":
    main()
