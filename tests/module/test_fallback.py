"""`fallback="eager"`: what capture refuses runs op by op, exact, with one warning and a plan that says so."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fxdp
from tests.eager.running import EXACT, OnRanks, difference, on_one_device, plain
from tests.rank_pool import RankPool


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc, self.norm, self.head = nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 4)


class _Loops(_Net):
    """As often as the values of the global batch say."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.norm(self.fc(x))
        while h.norm() > 3:
            h = h * 0.7
        out = self.head(h)
        return {"out": out, "loss": F.cross_entropy(out, y)}


class _Counts(_Net):
    """Keeps a number in Python, which decides what the next call computes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        out = self.head(self.fc(x)) * self.calls
        return {"out": out, "loss": F.cross_entropy(out, y)}


class _Selects(_Net):
    """Reads how many samples a mask leaves, and its own number of ranks."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = self.head(self.fc(x))
        kept = out[y > 1]
        weight = 1.0 if kept.shape[0] > 3 and bool(kept.mean() > -100) else 2.0
        return {"out": out, "loss": kept.square().sum() * weight / dist.get_world_size()}


class _Draws(_Net):
    """Decides by a number of NumPy."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = self.head(self.fc(x))
        keep = torch.from_numpy(np.random.rand(4) < 0.5)
        return {"out": out, "loss": (out * keep).square().mean() * (1 + random.random())}


def _steps(call: Callable[..., dict[str, Tensor]], net: nn.Module, batch: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    x, y = batch(torch.randn(8, 6), torch.randint(0, 4, (8,)))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        found = call(x, y)
        found["loss"].backward()
        optimizer.step()
        losses.append(found["loss"].item())
    return {
        "losses": torch.tensor(losses), "out": found["out"],
        **{name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in net.named_parameters()},
        **dict(net.named_buffers()),
    }  # fmt: skip


class _Local(OnRanks):
    def __call__(self, *tensors: Tensor) -> Any:
        return tuple(t.split(self.split)[dist.get_rank()] for t in tensors)


def _errors(split: tuple[int, ...], strategy: str) -> dict[str, tuple[float, str]]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for kind in (_Loops, _Counts, _Selects, _Draws):
        with fxdp.torch_compat.patched(fxdp.torch_compat.one_device()):
            expected = plain(_steps(net := kind(), net, on_one_device))
        for name, batch in (("local", _Local(split)), ("global", OnRanks(split))):
            net = kind()
            compiled = fxdp.compile(net, backend="eager", fallback="eager", strategy=strategy)
            got = _steps(compiled, net, batch)
            if name == "local":
                sizes = [len(got["out"])]
                got["out"] = torch.cat(_gathered(got["out"].detach(), split))
                assert sizes == [split[dist.get_rank()]]
            found[f"{kind.__name__} {name}"] = difference(expected, plain(got))
            assert "runs on global tensors, op by op" in str(compiled.plan), str(compiled.plan)
    return found


def _gathered(part: Tensor, split: tuple[int, ...]) -> list[Tensor]:
    parts = [part.new_empty(size, *part.shape[1:]) for size in split]
    full = [torch.zeros(max(split), *part.shape[1:]) for _ in split]
    own = full[0].clone()
    own[: len(part)] = part
    dist.all_gather(full, own)
    return [found[: len(empty)] for found, empty in zip(full, parts, strict=True)]


@pytest.mark.parametrize(("split", "strategy"), [((5, 0, 3), "replicate"), ((5, 3), "shard")], ids=str)
def test_refused_models_are_exact(ranks: RankPool, split: tuple[int, ...], strategy: str) -> None:
    for found in ranks.run(len(split), _errors, split, strategy):
        wrong = {name: where for name, (error, where) in found.items() if error > EXACT}
        assert not wrong, f"{wrong} of {found}"


def _draws_of_apart_ranks() -> list[float]:
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    net = _Draws()
    compiled = fxdp.compile(net, backend="eager", fallback="eager")
    x, y = torch.ones(2, 6), torch.zeros(2).long()
    return [compiled(x, y)["loss"].item() for _ in range(3)]


def test_ranks_whose_generators_differ_draw_alike(ranks: RankPool) -> None:
    first, second = ranks.run(2, _draws_of_apart_ranks)
    assert first == second
    assert len(set(first)) == 3


def _step_with_its_optimizer(split: tuple[int, ...]) -> tuple[float, str]:
    torch.set_default_dtype(torch.float64)

    def run(batch: Any, compiled: bool) -> dict[str, Any]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5), nn.Linear(7, 4))
        optimizer = torch.optim.Adam(net.parameters(), 0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x + 0.1 * torch.randn(x.size(0), 6)), y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            return loss.detach()

        call = fxdp.compile(step, backend="eager", fallback="eager") if compiled else step
        torch.manual_seed(0)
        x, y = batch(torch.randn(8, 6), torch.randint(0, 4, (8,)))
        losses = [float(call(x, y)) for _ in range(3)]
        return {"losses": torch.tensor(losses), **dict(net.named_parameters())}

    return difference(plain(run(on_one_device, False)), plain(run(_Local(split), True)))


def test_a_step_with_its_optimizer_is_exact(ranks: RankPool) -> None:
    for error, where in ranks.run(2, _step_with_its_optimizer, (5, 3)):
        assert error <= EXACT, where


def test_one_warning_names_the_line_and_the_cost(caplog: pytest.LogCaptureFixture) -> None:
    net, (x, y) = _Counts(), (torch.randn(8, 6), torch.arange(8) % 4)
    compiled = fxdp.compile(net, {"dp": 1}, backend="eager", fallback="eager")
    with caplog.at_level(logging.WARNING, "fxdp"):
        for calls in range(1, 4):
            assert torch.equal(compiled(x, y)["out"], net.head(net.fc(x)) * calls)
    (text,) = (record.getMessage() for record in caplog.records)
    assert "each op is looked up in Python" in text
    assert "test_fallback.py:" in text
    assert "self.calls += 1" in text
    plan = " ".join(str(compiled.plan).split())  # lines wrap, wherever the checkout is
    assert "runs on global tensors, op by op" in plan
    assert "self.calls += 1" in plan


class _Branches(_Net):
    """Computes something else for a single sample, of which no program is made."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return (h - h.mean(0)) / h.std(0) if x.shape[0] > 1 else 3 * h


def test_a_size_that_no_program_takes_falls_back_alone() -> None:
    net = _Branches()
    refusing, compiled = (fxdp.compile(net, {"dp": 1}, backend="eager", fallback=f) for f in (None, "eager"))
    with pytest.raises(fxdp.InputError, match=r"(?s)global batch is 1:.*test_fallback.py.*fallback='eager'"):
        refusing(torch.ones(1, 6))
    for samples, falls_back in ((4, False), (1, True), (3, False), (1, True), (5, False)):
        x = torch.randn(samples, 6)
        torch.testing.assert_close(compiled(x), net(x))
        assert ("op by op" in str(compiled.plan)) == falls_back, samples


def test_it_is_not_for_stages_and_not_for_other_words() -> None:
    with pytest.raises(fxdp.InputError, match="stages or micro-batches"):
        fxdp.compile(_Loops(), {"dp": 1}, fallback="eager", pipeline={"microbatches": 2})
    with pytest.raises(fxdp.InputError, match="fallback is 'slow'"):
        fxdp.compile(_Loops(), {"dp": 1}, fallback="slow")
