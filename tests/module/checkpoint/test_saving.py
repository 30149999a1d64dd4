"""Checkpoints: training goes on on other ranks as if nothing had been, and a kill leaves one that loads."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as names
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxdp
from fxdp.errors import InputError, RankFailedError
from fxdp.module.checkpoint import saving
from tests.captures import KNOWN, capture_ahead, captured_once
from tests.limits import scaled
from tests.rank_pool import RankPool

_AHEAD = range(3, 8)


class Net(nn.Module):
    """Tied, frozen, without dims, a buffer, fewer rows than ranks, and one that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 9)
        self.norm = nn.BatchNorm1d(9)
        self.outer = nn.Linear(9, 5, bias=False)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor, target: Tensor) -> Tensor:
        h = self.outer(torch.relu(self.norm(self.inner(self.table(words)))))
        return F.cross_entropy(self.head(self.frozen(h) * self.scale), target)


def _made(
    axes: tuple[str, ...], seed: int, strategy: str = "shard"
) -> tuple[fxdp.CompiledModule, torch.optim.Optimizer]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    world = dist.get_world_size()
    sizes = (world,) if len(axes) == 1 else (2, world // 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    compiled = fxdp.compile(Net(), mesh, strategy=strategy, backend="eager")
    return compiled, torch.optim.AdamW(compiled.parameters(), 1e-2)


def _know() -> None:
    torch.set_default_dtype(torch.float64)
    words = torch.zeros(7, dtype=torch.long)
    for size in (1, 2):
        capture_ahead(__name__, Net(), (words, words), {}, {"dp": size})


def _losses(
    compiled: nn.Module, optimizer: torch.optim.Optimizer, steps: range, stages: int = 1
) -> list[float]:
    losses, parts = [], dist.get_world_size() // stages
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        full = [torch.randint(0, 7, (7,), generator=generator) for _ in range(2)]
        own = [t.tensor_split(parts)[dist.get_rank() % parts] for t in full]
        with captured_once(KNOWN.setdefault(__name__, {})):
            loss = compiled(*own)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _drawn() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


def _by_torch(compiled: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": names.get_model_state_dict(compiled),
        "optimizer": names.get_optimizer_state_dict(compiled, optimizer),
    }


def _saving(folder: Path) -> tuple[list[float], list[float]]:
    compiled, optimizer = _made(("dp_shard",), dist.get_rank())
    fxdp.save(folder / "own", compiled, optimizer)  # to be replaced
    _losses(compiled, optimizer, range(3))
    fxdp.save(folder / "own", compiled, optimizer, step=3)
    pending: Any = dcp.async_save(_by_torch(compiled, optimizer), checkpoint_id=folder / "torch")
    drawn = _drawn()
    pending.result()
    return _losses(compiled, optimizer, _AHEAD), drawn


def _resuming(folder: Path, axes: tuple[str, ...], strategy: str) -> tuple[list[list[float]], list[float]]:
    compiled, optimizer = _made(axes, 9, strategy)
    assert fxdp.load(folder / "own", compiled, optimizer) == 3
    drawn, stages = _drawn(), 2 if "pp" in axes else 1
    losses = [_losses(compiled, optimizer, _AHEAD, stages)]
    state = _by_torch(compiled, optimizer)
    dcp.load(state, checkpoint_id=folder / "torch")
    names.set_model_state_dict(compiled, state["model"])
    # torch wants state of the parameter that never got a gradient, too
    options = names.StateDictOptions(strict=False)
    names.set_optimizer_state_dict(compiled, optimizer, state["optimizer"], options=options)
    return [*losses, _losses(compiled, optimizer, _AHEAD, stages)], drawn


def test_training_goes_on_with_other_ranks_meshes_and_strategies(ranks: RankPool, tmp_path: Path) -> None:
    ranks.prepare(_know)
    saved = ranks.run(4, _saving, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["own", "torch"]
    goals = (
        (1, "replicate", "dp"), (2, "replicate", "dp"), (2, "optimizer", "dp_shard"),
        (3, "shard", "dp_shard"), (4, "shard", "dp_replicate", "dp_shard"), (4, "shard", "pp", "dp_shard"),
    )  # fmt: skip
    for world, strategy, *axes in goals:
        resumed = ranks.run(world, _resuming, tmp_path, tuple(axes), strategy)
        for rank, (rows, drawn) in enumerate(resumed):
            for losses in rows:
                assert losses == pytest.approx(saved[0][0], abs=1e-9, rel=0)
            assert drawn == saved[rank][1]


def _alone(seed: int = 0) -> tuple[fxdp.CompiledModule, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    compiled = fxdp.compile(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)), strategy="shard")
    return compiled, torch.optim.AdamW(compiled.parameters())


def _values(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def test_a_checkpoint_of_another_model_is_refused_whole(tmp_path: Path) -> None:
    fxdp.save(tmp_path / "run", *_alone(), step=7)
    other = fxdp.compile(nn.Sequential(nn.Linear(5, 3), nn.Linear(4, 2, bias=False), nn.Linear(1, 1)))
    before = _values(other)
    with pytest.raises(InputError) as caught:
        fxdp.load(tmp_path / "run", other)
    for line in (
        "extra: model.1.bias",
        "missing: model.2.bias",
        "missing: model.2.weight",
        "model.0.bias is [4], expected [3]",
        "model.0.weight is [4, 5], expected [3, 5]",
    ):
        assert line in str(caught.value)
    assert all(map(torch.equal, before, _values(other)))


def test_the_optimizer_of_a_checkpoint_must_be_like_the_one_it_is_for(tmp_path: Path) -> None:
    compiled, optimizer = _alone()
    fxdp.save(tmp_path / "run", compiled, optimizer, step=7)
    assert not optimizer.state  # that of a step, which was not taken
    assert fxdp.load(tmp_path / "run", compiled, optimizer) == 7
    assert not optimizer.state
    sum(p.sum() for p in compiled.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    fxdp.save(tmp_path / "run", compiled, optimizer, step=8)
    groups = [{"params": [p]} for p in compiled.parameters()]
    with pytest.raises(InputError, match="1 groups of parameters of an optimizer, expected 4"):
        fxdp.load(tmp_path / "run", compiled, torch.optim.AdamW(groups))
    turned = torch.optim.AdamW(list(compiled.parameters())[::-1])
    with pytest.raises(InputError, match="parameter groups are"):
        fxdp.load(tmp_path / "run", compiled, turned)
    with pytest.raises(InputError, match=r"missing: optimizer\.state\.0\.bias\.max_exp_avg_sq"):
        fxdp.load(tmp_path / "run", compiled, torch.optim.AdamW(compiled.parameters(), amsgrad=True))
    fxdp.save(tmp_path / "run", compiled)
    with pytest.raises(InputError, match="0 groups of parameters of an optimizer, expected 1"):
        fxdp.load(tmp_path / "run", compiled, optimizer)


def test_an_optimizer_that_begins_with_state_for_frozen_parameters(tmp_path: Path) -> None:
    compiled, _ = _alone()
    compiled.get_parameter("0.bias").requires_grad_(False)
    for step in (1, 2):
        optimizer = torch.optim.Adagrad(compiled.parameters())
        fxdp.save(tmp_path / "run", compiled, optimizer, step=step)
        other = torch.optim.Adagrad(compiled.parameters())
        assert fxdp.load(tmp_path / "run", compiled, other) == step
        assert not compiled.get_parameter("0.bias").requires_grad
    bias = compiled.get_parameter("0.bias").requires_grad_(True)
    bias.grad = torch.ones_like(bias)
    other.step()


def test_state_of_a_parameter_that_is_frozen_now(tmp_path: Path) -> None:
    compiled, _ = _alone()
    bias = compiled.get_parameter("0.bias")
    optimizer = torch.optim.AdamW(compiled.parameters())
    sum(p.sum() for p in compiled.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    bias.requires_grad_(False)
    kept = optimizer.state[bias]["exp_avg"].clone()
    fxdp.save(tmp_path / "run", compiled, optimizer)
    for other in (torch.optim.AdamW(compiled.parameters()), optimizer):
        fxdp.load(tmp_path / "run", compiled, other)
        assert torch.equal(other.state[bias]["exp_avg"], kept)
        assert not bias.requires_grad


class _KeepsFromTheBeginning(torch.optim.Optimizer):
    """An optimizer that makes its state when it is made, and at no step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.5})
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["sum"] += p.grad
                p -= self.param_groups[0]["lr"] * self.state[p]["sum"]


def test_an_optimizer_that_keeps_state_from_the_beginning(tmp_path: Path) -> None:
    compiled, _ = _alone()
    optimizer = _KeepsFromTheBeginning(compiled.parameters())
    sum(p.sum() for p in compiled.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    fxdp.save(tmp_path / "run", compiled, optimizer, step=3)
    optimizer.step()
    other = _KeepsFromTheBeginning(compiled.parameters())
    for loaded in (optimizer, other):
        assert fxdp.load(tmp_path / "run", compiled, loaded) == 3
        assert all(own["sum"].eq(1).all() for own in loaded.state.values())
        assert len(loaded.state) == len(list(compiled.parameters()))


def test_what_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    compiled, optimizer = _alone()
    with pytest.raises(InputError, match="does not exist"):
        fxdp.load(tmp_path / "run", compiled)
    fxdp.save(tmp_path / "run", compiled, optimizer)
    (data,) = (tmp_path / "run").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-9])
    with pytest.raises(InputError, match=f"part of a checkpoint: {data.name} missing or cut off"):
        fxdp.load(tmp_path / "run", compiled)
    (tmp_path / "run" / ".metadata").unlink()
    with pytest.raises(InputError, match=r"is no checkpoint, or a part of one: it has no \.metadata"):
        fxdp.load(tmp_path / "run", compiled)
    with pytest.raises(InputError, match="is there already and is no checkpoint"):
        fxdp.save(tmp_path / "run", compiled)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is not writable"):
        fxdp.save(tmp_path / "file" / "run", compiled)
    with pytest.raises(InputError, match=r"what fxdp\.compile returned, got a Linear"):
        fxdp.save(tmp_path / "run", nn.Linear(1, 1))  # type: ignore[arg-type]


def _save_until_killed(path: Path, after: float) -> None:
    """Save on and on, every value the number of its step, and be killed in the midst of it."""
    compiled, _ = _alone()
    step = fxdp.load(path, compiled)
    threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        step += 1
        with torch.no_grad():
            for parameter in compiled.parameters():
                parameter.fill_(step)
        fxdp.save(path, compiled, step=step)


@pytest.mark.parametrize("world", [1, 2])
def test_a_kill_leaves_a_checkpoint(ranks: RankPool, tmp_path: Path, world: int) -> None:
    compiled, _ = _alone()
    torch.nn.utils.vector_to_parameters(torch.zeros(34), compiled.parameters())
    fxdp.save(tmp_path / "run", compiled)
    after = random.uniform(0, 0.2)
    outcomes = ranks.spawn(world, _save_until_killed, tmp_path / "run", after, init=world > 1)
    assert -9 in [outcome.status for outcome in outcomes]  # the other one may find out before its end
    step = fxdp.load(tmp_path / "run", compiled)
    assert all(bool((p == step).all()) for p in compiled.parameters())


def _save_while_one_hangs(folder: Path, late: int) -> str:
    compiled = fxdp.compile(nn.Linear(3, 2), backend="eager")

    def hang(*_: Any) -> None:
        while compiled._process_mesh.comms.liveness.departure is None:
            time.sleep(0.1)

    with mock.patch.object(saving, "_write", hang if dist.get_rank() == late else saving._write):
        try:
            fxdp.save(folder / "run", compiled)
        except RankFailedError as error:
            return str(error)
    return "saved"


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_hangs_while_all_save_is_named(ranks: RankPool, tmp_path: Path, late: int) -> None:
    own = {"FXDP_TIMEOUT_S": str(scaled(4.0))}
    outcomes = ranks.spawn(3, _save_while_one_hangs, tmp_path, late, environment=own)
    for outcome in outcomes:
        told = outcome.result or outcome.output
        assert f"rank {late} did not come to a collective in time\n  rank {late} is at " in told
        assert "test_saving.py" in told
