"""Blocks that wait for one another in the midst of a model: BatchNorm, losses over the batch, routers."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fxdp
from fxdp.pipeline.schedule.action import Kind
from fxdp.runtime import p2p
from tests.captures import KNOWN, captured_once
from tests.pipeline.cut.cuts import program
from tests.rank_pool import RankPool


class Pictures(nn.Module):
    """BatchNorms, dropout of a parameter, a router with its balance, rows chosen and compared."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.rows, self.router = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.experts = nn.Linear(4, 3 * 5)
        self.names, self.shift = nn.Embedding(9, 5), nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, y: Tensor, weights: Tensor) -> dict[str, Tensor]:
        hidden = self.rows(F.silu(self.norm(self.first(x))).mean((2, 3)))
        routed = self.router(self.dropout(hidden)).softmax(-1)
        share = F.one_hot(routed.argmax(-1), 3).to(x.dtype).mean(0)
        mixed = (self.experts(hidden).unflatten(1, (3, 5)) * routed[:, :, None]).sum(1)
        mixed = mixed * self.dropout(self.shift)  # of no sample: one mask for all
        left, right = F.normalize(mixed, dim=1), F.normalize(self.names(y), dim=1)
        near, own = left @ right.T * 5, torch.arange(len(x))
        each = F.cross_entropy(near, own, reduction="none") + F.cross_entropy(near.T, own, reduction="none")
        loss = (each * weights).sum() / weights.sum() + 0.1 * 3 * (share * routed.mean(0)).sum()
        loss = loss + hidden[hidden[:, 0] > 0].square().mean()
        return {"loss": loss + mixed.square().mean().sqrt(), "apart": (mixed - mixed.mean(0)).detach()}


def _batch(generator: torch.Generator) -> tuple[Tensor, ...]:
    x = torch.randn(8, 2, 5, 5, generator=generator)
    return x, torch.randint(0, 9, (8,), generator=generator), torch.rand(8, generator=generator)


def _trained(parts: Sequence[int], strategy: str = "replicate", stages: int = 1) -> dict[str, Tensor]:
    """Every number of two steps of this process, or of this rank of a process group."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # of which the order of sums within a block depends
    torch.manual_seed(0)
    shape, axes = (stages, len(parts)), ("pp", "dp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes) if stages > 1 else None
    rank, found = dist.get_rank() % len(parts) if stages * len(parts) > 1 else 0, dict[str, Tensor]()
    with captured_once(KNOWN.setdefault(__name__, {})):
        compiled = fxdp.compile(Pictures(), mesh, numerics={"block": 3}, strategy=strategy, backend="eager")
        optimizer = torch.optim.AdamW(compiled.parameters(), 0.01)
        own, data = slice(sum(parts[:rank]), sum(parts[: rank + 1])), torch.Generator().manual_seed(1)
        for step in range(2):
            given = compiled(*(t[own] for t in _batch(data)))
            given["loss"].backward()
            found[f"loss {step}"] = given["loss"].detach()
            found[f"norm {step}"] = nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found |= compiled.state_dict()
    torch.set_num_threads(before)
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}
    return {name: value.detach().clone() for name, value in full.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    """The numbers of one device."""
    return _trained((8,))


@pytest.mark.parametrize(
    ("parts", "strategy", "stages"),
    [
        ((3, 5), "replicate", 1),
        ((3, 0, 5), "shard", 1),
        ((8,), "replicate", 2),
        ((8,), "replicate", 3),
        ((3, 5), "shard", 2),
    ],
    ids=["2 ranks", "3 ranks, shard", "2 stages", "3 stages", "2 stages, 2 ranks, shard"],
)
def test_the_same_bits_on_any_mesh(
    alone: dict[str, Tensor], ranks: RankPool, parts: tuple[int, ...], strategy: str, stages: int
) -> None:
    for found in ranks.run(stages * len(parts), _trained, parts, strategy, stages):
        assert found.keys() == alone.keys()
        assert [name for name in alone if not torch.equal(found[name], alone[name])] == []


@pytest.mark.parametrize("training", [True, False])
def test_one_device_is_exact(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = list[Tensor]()
    monkeypatch.setattr(p2p, "aligned", lambda value: copied.append(value) or value.clone())
    torch.manual_seed(0)
    model = Pictures(dropout=0.0).double().train(training)
    model.get_parameter("norm.bias").requires_grad_(requires_grad=False)
    plain, batch = copy.deepcopy(model), _batch(torch.Generator().manual_seed(2))
    batch = tuple(t.double() if t.is_floating_point() else t for t in batch)
    expected, given = plain(*batch), fxdp.compile(model, numerics={"block": 3}, backend="eager")(*batch)
    for output in expected, given:
        output["loss"].backward()
    shapes = [value.shape for value in copied]
    assert shapes  # of what blocks go on from; no block reads a gradient
    assert model.get_parameter("first.weight").shape not in shapes
    for key, value in expected.items():
        assert torch.allclose(given[key], value, rtol=1e-12, atol=1e-14)
    for parameter, own in zip(plain.parameters(), model.parameters(), strict=True):
        assert (own.grad is None) == (parameter.grad is None)
        assert own.grad is None or torch.allclose(own.grad, parameter.grad, rtol=1e-9, atol=1e-13)  # type: ignore[arg-type]
    for name, buffer in plain.state_dict().items():
        assert torch.allclose(model.state_dict()[name], buffer, rtol=1e-12)


def test_the_program_is_the_same_on_any_mesh() -> None:
    """The bits depend on its ops and their placements, which know of no ranks."""
    batch = _batch(torch.Generator().manual_seed(0))
    made = [program(Pictures(), *batch, dp=dp, numerics={"block": 2}) for dp in (2, 3, 4)]
    assert len({one.text.partition("\n")[2] for one in made}) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activation_checkpointing": "always"}, r"mode='always'\) with .* waits .*\n"),
        ({"activation_checkpointing": 0.5}, r"budget=0.5\) with .* waits .*\n"),
        ({"pipeline": {"schedule": "1f1b"}, "backend": "eager"}, r"='1f1b'(.|\n)* goes on:\n"),
    ],
    ids=str,
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    batch = _batch(torch.Generator().manual_seed(0))
    where = r"  at .*test_rounds.py:\d+ .* in norm: all_red"
    with pytest.raises((fxdp.StageError, fxdp.ScheduleError), match=words + where):
        fxdp.plan(Pictures(), batch, **{"mesh": {"dp": 2}, **options}, numerics={"block": 2})


def test_the_plan_draws_what_ranks_run() -> None:
    batch, options = _batch(torch.Generator().manual_seed(0)), {"numerics": {"block": 2}, "backend": "eager"}
    made = program(Pictures(), *batch, ranks=2, dp=2, **options)
    drawn = made.drawn_schedule
    assert {action.kind for action in drawn.ranks[1]} == {Kind.FORWARD, Kind.BACKWARD}
    layout = made.layout({"B": 64, "b": 32, "offset": 0, "b_max": 32})
    for rank, row in enumerate(drawn.ranks):
        names = [node.name for node in made.writer(layout, rank).write().nodes]
        calls = filter(None, (re.fullmatch(r"round_(\d+)_turn_(\d+)_mb(\d+)", name) for name in names))
        ran = [(int(call[1]), int(call[3])) for call in calls]
        planned = [share for share, _ in itertools.groupby((a.round, a.microbatch) for a in row)]
        assert ran[-len(planned) :] == planned  # after the rounds of inputs alone
        assert all(share[0] < planned[0][0] for share in ran[: -len(planned)])
