"""A step of a small uncompiled model: forward, loss, backward, SGD; global tensors beside DDP and DTensor.

    python -m benchmarks.speed.eager_step [RANKS]

The middle of three runs' least steps, in milliseconds: wall time and CPU time of rank 0's thread that steps
(the backward runs in it, too). With one rank nothing is sent.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.nn import functional as F

import fxdp

_STEPS, _RUNS = 30, 5
_BATCH, _WIDTH, _LAYERS = 16, 32, 6


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(_LAYERS):
        layers += [nn.Linear(_WIDTH, _WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def _step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _steps(rank: int, ranks: int) -> dict[str, Callable[[], None]]:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    torch.manual_seed(1)
    x, y = torch.randn(_BATCH, _WIDTH), torch.randint(_WIDTH, (_BATCH,))
    part = slice(rank * _BATCH // ranks, (rank + 1) * _BATCH // ranks)
    own_x, own_y = x[part].clone(), y[part].clone()
    global_x, global_y = fxdp.global_batch((own_x, own_y), mesh)
    dx, dy = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(y, mesh, [Shard(0)])
    dmodel = distribute_module(_model(), mesh)
    assert all(isinstance(p, DTensor) and p.placements == (Replicate(),) for p in dmodel.parameters())
    return {
        "plain, own part": _step(_model(), own_x, own_y),
        "DDP": _step(nn.parallel.DistributedDataParallel(_model()), own_x, own_y),
        "global": _step(_model(), global_x, global_y),
        "DTensor": _step(dmodel, dx, dy),
    }


def _run(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    steps = _steps(rank, ranks)
    if rank == 0:
        print(f"{ranks} ranks\n\n| step, ms | wall | CPU |\n|---|---|---|")
    for name, step in steps.items():
        for _ in range(5):
            step()
        wall, cpu = [], []
        for _ in range(_RUNS):
            begins = time.perf_counter(), time.thread_time()
            for _ in range(_STEPS):
                step()
            wall.append((time.perf_counter() - begins[0]) / _STEPS)
            cpu.append((time.thread_time() - begins[1]) / _STEPS)
        if rank == 0:
            print(f"| {name} | {min(wall) * 1e3:.2f} | {min(cpu) * 1e3:.2f} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Print a table for the given number of ranks (1)."""
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (ranks, str(Path(folder) / "store")), ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
