"""Long runs: what a rank holds does not grow with the steps, whatever sizes its batches have.

`python -m benchmarks.chaos.soak` runs 2,000 steps of each kind; here are a few hundred.
"""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxdp
from tests.rank_pool import RankPool

SIZES = 6  # of a rank's batch, from none at all
EVALUATED = 11  # every so many steps
_DESCRIPTORS = "/proc/self/fd"
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(F.relu(self.first(x))), y)


def descriptors() -> dict[str, str]:
    """What each open descriptor of this process is."""
    found = {}
    for number in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[number] = os.readlink(f"{_DESCRIPTORS}/{number}")
    return found


def local_of(compiled: fxdp.CompiledModule) -> dict[str, Any]:
    """What this process holds: memory in KiB, descriptors, threads, programs, objects."""
    gc.collect()
    return {
        "memory": int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE // 1024,
        "descriptors": descriptors(),
        "threads": len(os.listdir("/proc/self/task")),
        "programs": compiled._programs.compiled,
        "objects": len(gc.get_objects()),
    }


def soaked(stages: bool, steps: int) -> list[dict[str, Any]]:
    """What this rank holds after a quarter of the steps, a half, and all."""
    mesh: Any = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp")) if stages else None
    options: dict[str, Any] = (
        {"pipeline": {"microbatches": 4}} if stages else {"debug": {"check_replicas": 20}}
    )
    compiled = fxdp.compile(Net(), mesh, backend="eager", **options)
    optimizer = torch.optim.Adam(compiled.parameters(), lr=1e-3)
    own = 0 if stages else dist.get_rank()
    found = []
    for step in range(1, steps + 1):
        size = 1 + step % (SIZES - 1) if stages else (step + own * (step // SIZES + 1)) % SIZES
        size += not stages and own == 1 and (step % SIZES, size) == (0, 0)  # somebody has a sample
        x, y = torch.randn(size, 6), torch.randint(3, (size,))
        if stages:
            x, y = torch.ones(size, 6), torch.zeros(size, dtype=torch.long)
        compiled(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVALUATED == 0:
            with torch.no_grad():
                compiled.eval()(x, y)
            compiled.train()
        if step in (steps // 4, steps // 2, steps):
            found.append(local_of(compiled))
    return found


@pytest.mark.parametrize("stages", [False, True])
def test_nothing_grows(ranks: RankPool, stages: bool) -> None:
    for quarter, half, full in ranks.run(2, soaked, stages, 240):
        opened = full["descriptors"].items() - quarter["descriptors"].items()
        assert not opened
        assert full["threads"] <= quarter["threads"]  # what the task before left may still end meanwhile
        assert full["programs"] == quarter["programs"]
        assert full["memory"] - half["memory"] < 2048
        assert full["objects"] - half["objects"] < 200
