"""Rank processes on GPUs, joined by NCCL; more ranks than GPUs share them.

NCCL refuses two ranks on one GPU of one host. `NCCL_HOSTID` tells it that each rank is a host of its own: it
then goes by sockets, with the same kernels, streams and events. It is as right, and much slower: nothing here
may be timed.
"""

from __future__ import annotations

import faulthandler
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from tests.limits import HANG_S

ON_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
"""Marks of tests that run ranks."""


def run_ranks(
    count: int, folder: Path, function: Callable[..., Any], *arguments: Any, but: int | None = None
) -> list[Any]:
    """What `function(*arguments)` returns on each of so many ranks; AssertionError with a rank's traceback.

    `but` is a rank that may end as it likes; its place in the list is None.
    """
    store = str(folder / "store")
    context = multiprocessing.get_context("spawn")
    work = (count, store, str(folder), function, arguments)
    processes = [context.Process(target=_rank, args=(rank, *work)) for rank in range(count)]
    for process in processes:
        process.start()
    end = time.monotonic() + HANG_S
    try:
        for process in processes:
            process.join(max(end - time.monotonic(), 0.0))
    finally:
        for process in processes:
            process.kill()
            process.join()
    answers = [_answer(folder / f"answer{rank}") for rank in range(count)]
    said = {rank: error for rank, (_, error) in enumerate(answers) if error and rank != but}
    assert not said, "\n".join(f"rank {rank}: {error}" for rank, error in said.items())
    codes = [process.exitcode for rank, process in enumerate(processes) if rank != but]
    assert not any(codes), f"ranks ended with {codes} after their answers"
    return [result for result, _ in answers]


def _answer(path: Path) -> tuple[Any, str]:
    return torch.load(path, weights_only=False) if path.exists() else (None, "no answer")


def _rank(
    rank: int, count: int, store: str, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    faulthandler.enable()
    devices = torch.cuda.device_count()
    if devices < count:
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.cuda.set_device(rank % devices)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=count)
    answer: tuple[Any, str] = (None, "")
    try:
        answer = (function(*arguments), "")
    except BaseException:
        answer = (None, traceback.format_exc())
    torch.save(answer, Path(folder) / f"answer{rank}")
    if not answer[1]:
        dist.destroy_process_group()
    else:
        os._exit(0)  # the others may never come
