"""`fxdp.launch`: a function on several ranks, from one process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fxdp
from tests.limits import HANG_S, SOON_S
from tests.rank_pool import RankPool


def test_results_come_in_the_order_of_ranks() -> None:
    offset = 10  # a function of a notebook's cell is of no module

    def sums(value: float, *, factor: float) -> tuple[int, float, str]:
        total = torch.tensor(value * (dist.get_rank() + 1))
        dist.all_reduce(total)
        return dist.get_rank() + offset, float(total) * factor, os.environ["WORLD_SIZE"]

    assert fxdp.launch(sums, 2.0, nproc=3, factor=0.5) == [(10, 6.0, "3"), (11, 6.0, "3"), (12, 6.0, "3")]
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


def test_a_model_trains_as_on_one_device() -> None:
    x, y = torch.randn(5, 3).double(), torch.randint(2, (5,))
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    def trained() -> tuple[torch.Tensor, torch.Tensor]:
        compiled = fxdp.compile(model, loss_fn=F.cross_entropy, backend="eager")
        mine = slice(0, 4) if compiled.mesh.rank == 0 else slice(4, 5)
        loss = compiled(x[mine], target=y[mine])
        loss.backward()
        return loss.detach(), model[0].weight.grad

    found = fxdp.launch(trained)
    F.cross_entropy(model(x), y).backward()
    for loss, grad in found:
        torch.testing.assert_close(grad, model[0].weight.grad)
        torch.testing.assert_close(loss, found[0][0])


def _plans_and_launches() -> list[float]:
    model, x = nn.Linear(2, 1), torch.randn(4, 2)
    fxdp.plan(model, (x,), mesh={"dp": 2})

    def gradient() -> float:
        loss = fxdp.compile(model, backend="eager")(x[2 * dist.get_rank() :][:2]).sum()
        loss.backward()
        return loss.item()

    return fxdp.launch(gradient)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="with GPUs no fork may follow a backward")
def test_after_a_plan(ranks: RankPool) -> None:
    (ended,) = ranks.spawn(1, _plans_and_launches, init=False)
    assert ended.status == 0, ended.output
    assert len(ended.result) == 2


def _is_forked_late() -> None:
    raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")


def _raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.barrier()


def _dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(HANG_S)


def _is_not_pickled() -> Any:
    return threading.Lock() if dist.get_rank() == 1 else None


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_raises, r"rank 1 of 2 raised ValueError: the cause\n(.|\n)*in _raises"),
        (_is_forked_late, r"Expected launch before any backward.*\(restart the notebook\), or torchrun"),
        (_dies, "rank 1 of 2 died of SIGKILL"),
        (_is_not_pickled, "rank 1 of 2 raised TypeError: cannot pickle '_thread.lock' object"),
    ],
)
def test_the_rank_at_fault_is_named(function: Callable[[], Any], said: str) -> None:
    start = time.monotonic()
    with pytest.raises(fxdp.RankFailedError, match=said):
        fxdp.launch(function)
    assert time.monotonic() - start < SOON_S


def test_ranks_are_stopped_in_time() -> None:
    with pytest.raises(fxdp.RankFailedError, match=r"stopped after 0\.5 s, as ranks 0, 1 of 2 had no result"):
        fxdp.launch(time.sleep, HANG_S, timeout=0.5)


def _terminates_its_parent(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(HANG_S)


def _is_terminated(folder: Path) -> object:
    with pytest.raises(SystemExit) as ended:
        fxdp.launch(_terminates_its_parent, folder)
    return ended.value.code


def test_who_is_terminated_leaves_no_rank_behind(ranks: RankPool, tmp_path: Path) -> None:
    (ended,) = ranks.spawn(1, _is_terminated, tmp_path, init=False)
    assert ended.result == 128 + signal.SIGTERM, ended.output
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_cannot_be_launched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fxdp.InputError, match="nproc is 0, expected a number of at least 1"):
        fxdp.launch(time.sleep, nproc=0)
    with pytest.raises(fxdp.InputError, match="a function and its arguments: launch\\(train, 3, nproc=2\\)"):
        fxdp.launch(time.sleep(0))  # type: ignore[func-returns-value,arg-type]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(fxdp.StateError, match="this process is rank 1 of 2 already"):
        fxdp.launch(time.sleep, 0)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(fxdp.StateError, match="as Linux does, and this is darwin; expected torchrun"):
        fxdp.launch(time.sleep, 0)
