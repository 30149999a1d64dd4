"""Losses that leave out outputs: `grad is None`, and what optimizers make of it, as on one device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxdp
from fxdp.ir.tensor_difference import difference
from tests.captures import captured_once
from tests.exactness.models import gradient_errors, part
from tests.rank_pool import RankPool


class _Heads(nn.Module):
    """Two heads on one body; the rows of neighbours lie side by side, and `jump` has zeros for a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 8)
        self.aux = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.last, self.jump = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.last(self.head(h)), self.aux(h) + self.jump.floor() * h


class _Scalars(_Heads):
    """The same with losses of its own."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        out, aux = super().forward(x)
        return {"loss": out.square().mean(), "aux": aux.square().mean()}


class _Pairs(nn.Module):
    """Two outputs, of which each depends on an input and parameters of its own; feeds another one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(y)


def _loss(outputs: Any, read: str) -> Tensor:
    values = list(outputs.values()) if isinstance(outputs, dict) else [o.square().mean() for o in outputs]
    return sum((v for v, name in zip(values, ("out", "aux"), strict=True) if name in read), torch.zeros(()))


def _full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def _train(kind: type[_Heads], steps: Sequence[Sequence[str]], **options: Any) -> float:
    """How far training is from one device; `steps` are what the losses of each rank read."""
    model = kind()
    twin, rank = copy.deepcopy(model), dist.get_rank()
    compiled = fxdp.compile(model, backend="eager", **options)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1, weight_decay=0.5) for m in (model, twin)]
    split = [3] * len(steps[0])
    own = rank if len(split) > 1 else 0
    far = []
    for step, reads in enumerate(steps):
        x = torch.randn(sum(split), 4, generator=torch.Generator().manual_seed(step))
        _loss(compiled(part(x, split, own)), reads[own]).backward()
        if kind is _Scalars:
            _loss(twin(x), reads[0]).backward()
        else:
            parts = [_loss(twin(part(x, split, i)), read) for i, read in enumerate(reads)]
            (sum(parts, torch.zeros(())) / len(split)).backward()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (name, step)
        if step % 3:  # else gradients accumulate
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        pairs = zip(map(_full, model.parameters()), map(_full, twin.parameters()), strict=True)
        far += [difference(p, q) for p, q in pairs]
    return max(far)


def _fed() -> float:
    """A compiled module in front of another, whose loss reads nothing of one input."""
    models = _Pairs(), _Pairs()
    twins = copy.deepcopy(models)
    x = torch.randn(6, 4)
    compiled = [fxdp.compile(m, backend="eager") for m in models]
    for (first, second), rows in ((compiled, part(x, [3, 3], dist.get_rank())), (twins, x)):
        _loss(second(*first(rows, rows)), "out").backward()
    assert twins[0].other.weight.grad is None
    return max(error for m, twin in zip(models, twins, strict=True) for error in gradient_errors(m, twin))


def _differ() -> str:
    """Ranks that read other outputs of the global batch than one another."""
    model = fxdp.compile(_Scalars(), backend="eager")
    try:
        for read in ("out aux", ("out", "out aux")[dist.get_rank()], "out aux"):
            _loss(model(torch.randn(3, 4)), read).backward()
    except fxdp.FxdpError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _undefined_gradients() -> str:
    """A rank that leaves out a backward in which the other asks it."""
    model = fxdp.compile(_Heads(), backend="eager")
    try:
        for step in range(3):
            loss = _loss(model(torch.randn(3, 4)), "out aux")
            if step != 1 or dist.get_rank():
                loss.backward()
    except fxdp.FxdpError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _all() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    apart = [
        ("out aux", "out"), ("out", "out"), ("aux", "out"), ("aux", "aux"), ("out aux", "out aux"),
        ("out", "out"),
    ]  # fmt: skip
    alike = [(own, own) for own in ("out aux", "out", "out")]
    found: dict[str, Any] = {"fed": _fed()}
    with captured_once():  # models of one class with inputs of one kind
        for strategy in ("replicate", "shard"):
            found[strategy] = _train(_Heads, apart, strategy=strategy)
        found["scalars"] = _train(_Scalars, alike)
        stages = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
        found["stages"] = _train(_Scalars, [("out",)] * 3, mesh=stages, pipeline={"microbatches": 2})
        found["left out"] = _undefined_gradients()
    return found


@pytest.fixture(scope="module")
def found(ranks: RankPool) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    all_: list[dict[str, Any]] = ranks.run(2, _all)
    ranks.renew()
    return all_


@pytest.mark.parametrize("way", ["replicate", "shard", "scalars", "stages", "fed"])
def test_training_is_that_of_one_device(found: list[dict[str, Any]], way: str) -> None:
    assert max(rank[way] for rank in found) <= 1e-9


def test_a_backward_left_out_where_ranks_ask(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "AgreementError" in rank["left out"] or "RankFailedError" in rank["left out"], rank
        assert "call 2 of _Heads" in rank["left out"] or "call 3 of _Heads" in rank["left out"], rank


def test_whole_outputs_must_be_read_by_all_ranks_alike(ranks: RankPool) -> None:
    said = ranks.run(2, _differ)
    ranks.renew()
    for words in said:
        assert words.startswith("AgreementError: ")
        assert "rank 0 ran a backward of a loss that does not read output 1" in words
