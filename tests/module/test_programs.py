"""Uneven batches with gathers on real ranks: specialised first, for any size at the second batch."""

from __future__ import annotations

import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import fxdp
from fxdp.module.programs import Programs
from fxdp.torch_compat import as_if_exporting, compile_lock
from tests.limits import HANG_S
from tests.rank_pool import RankPool


class Pairs(nn.Module):
    """Every sample against every other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.a(x) @ self.b(x).t()
        return F.cross_entropy(scores, torch.arange(x.shape[0])), scores.detach()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Pairs().double()


def _steps(splits: list[list[int]]) -> tuple[list[list[float]], int]:
    model = _model()
    compiled = fxdp.compile(model, backend="eager")
    rank, found = dist.get_rank(), []
    for i, sizes in enumerate(splits):
        x = _batch(i, sum(sizes)).split(sizes)[rank]
        loss, scores = compiled(x)
        assert scores.shape == (sizes[rank], sum(sizes))
        model.zero_grad()
        loss.backward()
        found.append(_flat(loss, model))
    return found, compiled._programs.compiled


def _batch(seed: int, size: int) -> Tensor:
    return torch.randn(size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _flat(loss: Tensor, model: nn.Module) -> list[float]:
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return [loss.item(), *torch.cat(grads).tolist()]


def test_uneven_parts_and_gathers(ranks: RankPool) -> None:
    splits = [[3, 1, 2], [0, 4, 1], [2, 2, 2], [3, 1, 2]]
    model = _model()
    expected = []
    for i, sizes in enumerate(splits):
        model.zero_grad()
        loss, _ = model(_batch(i, sum(sizes)))
        loss.backward()
        expected.append(_flat(loss, model))
    for found, programs in ranks.run(3, _steps, splits):
        assert programs == 2
        for got, wanted in zip(found, expected, strict=True):
            assert got == pytest.approx(wanted, abs=1e-12)


class Cut(nn.Module):
    """Reads no more of each sample than another input has, and a row of a table for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(4.0, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x[:, : y.shape[1]].mean() + self.table[: len(x)].mean()


def test_which_of_two_sizes_ends_a_slice_is_asked_at_each_call() -> None:
    compiled = fxdp.compile(Cut(), backend="eager")
    for samples, own, other in ((3, 4, 2), (2, 5, 7), (3, 9, 3), (6, 8, 2), (6, 2, 8)):
        x, y = _batch(own, samples * own)[:, 0].view(samples, own), torch.ones(samples, other)
        assert compiled(x, y).item() == pytest.approx(Cut()(x, y).item(), rel=1e-12)


def test_threads_may_compile_models_at_the_same_time() -> None:
    """What is changed in torch and Python while a model is compiled is the same for all threads."""
    patched = [(nn.Module, "_apply"), (F, "ctc_loss"), (_BatchNorm, "forward"), (warnings, "showwarning")]
    before = [getattr(owner, name) for owner, name in patched]
    models = [fxdp.compile(_model(), backend="eager") for _ in range(4)]
    expected = _model()(_batch(0, 5))[0].item()
    with ThreadPoolExecutor(4) as threads:
        for loss, _ in threads.map(lambda model: model(_batch(0, 5)), models):
            assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert [getattr(owner, name) for owner, name in patched] == before


def test_a_model_is_called_while_another_thread_captures_one() -> None:
    compiled = fxdp.compile(_model(), backend="eager")
    loss, _ = compiled(_batch(0, 5))
    inside, over = threading.Event(), threading.Event()

    def capture() -> None:
        with compile_lock, as_if_exporting():
            inside.set()
            over.wait(HANG_S)

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(capture)
        assert inside.wait(HANG_S)
        try:
            again, _ = compiled(_batch(0, 5))
        finally:
            over.set()
        done.result()
    assert again.item() == loss.item()


def test_nothing_is_collected_between_the_capture_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection in between goes through all that the capture made: a tenth of a first step."""
    enabled: list[bool] = []
    serve = Programs._serve

    def noted(self: Programs, *args: Any, **kwargs: Any) -> Any:
        enabled.append(gc.isenabled())
        return serve(self, *args, **kwargs)

    monkeypatch.setattr(Programs, "_serve", noted)
    assert gc.isenabled()
    fxdp.compile(nn.Linear(2, 2), backend="eager")(torch.ones(4, 2))
    assert gc.isenabled()
    assert enabled == [False]
