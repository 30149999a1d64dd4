"""Wrong calls and dying ranks in a pipeline: all ranks say so, or stop within seconds and name it."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxdp
from tests.captures import KNOWN, captured_once
from tests.limits import SOON_S
from tests.pipeline.models import Skips, skips
from tests.rank_pool import RankPool


@pytest.fixture(scope="module", autouse=True)
def _fresh_ranks_afterwards(ranks: RankPool) -> Iterator[None]:
    """gloo's threads may outlive a group that was broken on purpose: later tests get other processes."""
    yield
    ranks.renew()


def _mesh(pp: int) -> Any:
    return init_device_mesh("cpu", (pp, dist.get_world_size() // pp), mesh_dim_names=("pp", "dp"))


# ---- a rank that fails in mid-schedule ----


def _train(how: str, kind: str, guilty: int) -> None:
    """The guilty rank fails inside its third forward or second half of a backward, others under way."""
    compiled = fxdp.compile(Skips(), _mesh(3), pipeline={"microbatches": 4}, backend="eager")
    compiled(**skips(8))["loss"].backward()
    if dist.get_rank() == guilty:
        step: Any = compiled.program.graph.owning_module
        module = step.get_submodule(f"{kind}_{guilty}")
        run, left = module.forward, [3 if kind == "forward" else 2]

        def failing(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and how == "raises":
                raise ValueError("the reason")
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return run(*args)

        module.forward = failing
    compiled(**skips(8))


@pytest.mark.parametrize(
    ("how", "kind", "guilty", "words"),
    [
        ("raises", "input_gradient", 1, "failed: ValueError: the reason"),
        ("is killed", "forward", 0, "ended without an error message"),
        ("is killed", "weight_gradient", 2, "ended without an error message"),
    ],
)
def test_all_ranks_stop(ranks: RankPool, how: str, kind: str, guilty: int, words: str) -> None:
    outcomes = ranks.spawn(3, _train, how, kind, guilty)
    ends = [outcome.seconds for outcome in outcomes]
    assert max(ends) - min(ends) < SOON_S
    for rank, outcome in enumerate(outcomes):
        if rank != guilty:
            assert outcome.status == 1, outcome.output
            assert f"RankFailedError: rank {guilty} {words}" in outcome.output, outcome.output


# ---- calls that are refused, and the next one works ----


class TwoLosses(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, width), nn.Linear(width, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = self.b(torch.relu(self.a(x)))
        return F.cross_entropy(out, y), out.square().mean(), out


def _say(action: Any) -> str:
    try:
        action()
    except fxdp.FxdpError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _batch(size: int) -> dict[str, Tensor]:
    """The same on all ranks, whatever was drawn before."""
    torch.manual_seed(size)
    return skips(size)


def _backward_twice(compiled: fxdp.CompiledModule) -> None:
    loss = compiled(**_batch(4))[0]
    loss.backward(retain_graph=True)
    loss.backward()


def _own_schedule(order: str) -> str:
    """The error of a step whose schedule is read from this rank's own file."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("order.csv").write_text(order)
        compiled = fxdp.compile(
            TwoLosses(),
            _mesh(2),
            pipeline={"microbatches": 2, "schedule": "order.csv", "stages": 2},
            backend="eager",
        )
        return _say(lambda: compiled(**_batch(4))[0].backward())


def _refused() -> dict[str, str]:
    rank = dist.get_rank()
    compiled = fxdp.compile(TwoLosses(), _mesh(2), pipeline={"microbatches": 2}, backend="eager")
    column = 2 if rank == 3 else 4
    orders = ["0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", "0F1,0F0,0B1,0B0\n1F1,1B1,1F0,1B0\n"]
    found = {
        "other schedules": _own_schedule(orders[rank // 3]),
        "own schedules": _own_schedule(orders[1]),
        "other batches": _say(lambda: compiled(**_batch(column))),
        "another output": _say(lambda: compiled(**_batch(4))[1].backward()),
        "a tensor": _say(lambda: compiled(**_batch(4))[2].sum().backward()),
        "twice": _say(lambda: _backward_twice(compiled)),
        "other models": _say(lambda: fxdp.compile(TwoLosses(8 + rank // 3), _mesh(2))(**_batch(4))),
        "other options": _say(
            lambda: fxdp.compile(TwoLosses(), _mesh(2), pipeline={"microbatches": 2 + rank // 3})(**_batch(4))
        ),
    }
    compiled.zero_grad()
    compiled(**_batch(4))[0].backward()
    found["works"] = str(all(p.grad is not None for p in compiled.parameters()))
    return found


def test_wrong_calls_are_refused_on_all_ranks_and_the_next_one_works(ranks: RankPool) -> None:
    expected = {
        "other batches": "InputError: rank 3 of the mesh has a batch of 2, another rank with the same data",
        "another output": "StateError: output 1 of a model in stages or micro-batches was differentiated",
        "a tensor": "StateError: output 2 of a model in stages or micro-batches was differentiated",
        "twice": "StateError: backward() a second time through a step in stages or micro-batches",
        "other schedules": "AgreementError: ranks were given different schedules: line 1: ranks 0, 1, 2 have",
        "own schedules": "no error",
        "other models": "AgreementError",
        "other options": "AgreementError",
        "works": "True",
    }
    for found in ranks.run(4, _refused):
        for name, words in expected.items():
            assert found[name].startswith(words), found[name]


# ---- dropout ----


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.dropout(self.a(x), 0.5, self.training)
        return F.cross_entropy(F.dropout(self.b(hidden).relu(), 0.3, self.training), y)


def _noisy() -> list[tuple[float, list[Any]]]:
    """Loss and gradients with each policy of recomputation, twice from one seed, and from another seed."""
    found = []
    for checkpoint, seed in (("never", 1), ("never", 1), ("always", 1), ("except_last", 1), ("never", 2)):
        torch.manual_seed(0)
        model = Noisy()
        compiled = fxdp.compile(
            model,
            _mesh(2),
            pipeline={"stages": ["b"], "microbatches": 3},
            activation_checkpointing=checkpoint,
            backend="eager",
        )
        torch.manual_seed(seed)
        with captured_once(KNOWN.setdefault(__name__, {})):
            loss = compiled(**skips(7))
        loss.backward()
        found.append((loss.item(), [p.grad.tolist() for p in model.parameters() if p.grad is not None]))
    return found


def test_dropout_is_that_of_the_seed_recomputed_or_not(ranks: RankPool) -> None:
    for first, again, always, except_last, other in ranks.run(2, _noisy):
        assert first == again == always == except_last
        assert other[0] != first[0]
