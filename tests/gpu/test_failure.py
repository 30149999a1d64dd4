"""A rank that dies or raises while others wait for it in NCCL: they stop within seconds and name it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fxdp
from fxdp.errors import RankFailedError
from tests.gpu.ranks import ON_GPUS, run_ranks
from tests.gpu.training import CASES
from tests.limits import SOON_S

pytestmark = ON_GPUS


def _train(how: str) -> str:
    """What rank 0 is told; rank 1 ends before the third step, rank 0 has begun it."""
    torch.manual_seed(0)
    build, batch_of = CASES["gpt"]
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
    compiled = fxdp.compile(build().cuda(), mesh, backend="eager")
    batch = tuple(t.cuda() for t in batch_of(4))
    for _ in range(2):
        compiled(*batch).backward()
    if dist.get_rank() == 1:
        torch.cuda.synchronize()
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the reason")
    start = time.monotonic()
    try:
        for _ in range(3):
            compiled(*batch).backward()
            torch.cuda.synchronize()
    except RankFailedError as error:
        assert time.monotonic() - start < SOON_S
        return str(error)
    return "nothing was told"


@pytest.mark.parametrize("how", ["is killed", "raises"])
def test_the_others_stop(how: str, tmp_path: Path) -> None:
    said = run_ranks(2, tmp_path, _train, how, but=1)[0]
    assert "rank 1" in said
