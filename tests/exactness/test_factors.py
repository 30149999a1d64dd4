"""Gradients that each rank computes in full, of gathered factors: those of one device, whatever the split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import fxdp
from fxdp.compiler.program import Program
from fxdp.ir.graph.metadata import meta
from tests.exactness.models import counterpart_of, gradient_errors, part
from tests.lockstep import check
from tests.rank_pool import RankPool

_SLOW = {"communication": {"link_gbit": 1e-3}}
_SPLITS = [3, 3, 3], [5, 0, 2], [1, 3, 3], [2, 2, 2]


class Words(nn.Module):
    """An embedding, layers on tokens of several dims, one that is used twice, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(400, 24)
        self.wide, self.narrow, self.twice = nn.Linear(24, 96), nn.Linear(96, 24), nn.Linear(24, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.head = nn.Linear(24, 5)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        h = self.narrow(torch.tanh(self.wide(self.rows(ids))))
        h = self.frozen(self.twice(torch.tanh(self.twice(h))))
        return F.cross_entropy(self.head(h.mean(1)), y, ignore_index=0)


class Turned(nn.Module):
    """Sequences first, the batch second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.head = nn.Linear(40, 120), nn.Linear(120, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.relu(self.wide(x.transpose(0, 1)))
        return F.cross_entropy(self.head(h[-1]), y)


def _words(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(400, (size, 4)), torch.randint(5, (size,))


def _turned(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 40), torch.randint(3, (size,))


def _gathered(program: Program) -> set[str]:
    """The parameters of which factors travel."""
    causes = [cause.text for n in program.causes.graph.nodes if (cause := meta(n).cause)]
    return {text.removeprefix("factor of gradient of ") for text in causes if text.startswith("factor")}


def test_every_split_of_an_embedding_and_layers() -> None:
    program = check(Words(), _words(9), splits=((3, 4), (5, 2, 0, 1), (1, 1)), **_SLOW)
    # `twice` is a sum of two products
    assert _gathered(program) == {"rows.weight", "wide.weight", "narrow.weight", "head.weight"}


def test_every_split_of_a_batch_that_is_second() -> None:
    # what comes back to a layer is gathered for its bias first, and for its weight as well
    assert _gathered(check(Turned(), _turned(9), **_SLOW)) == {"wide.bias", "wide.weight", "head.weight"}


@pytest.mark.parametrize("strategy", ["shard", "optimizer"])
def test_gradients_that_are_dealt_out(strategy: str) -> None:
    assert "wide.weight" in _gathered(check(Words(), _words(9), strategy=strategy, **_SLOW))


def test_layers_that_are_computed_again() -> None:
    assert "wide.weight" in _gathered(
        check(Words(), _words(9), activation_checkpointing=["wide", "narrow"], **_SLOW)
    )


@pytest.mark.parametrize("reduce", [None, torch.float32])
def test_in_mixed_precision_factors_are_narrow(reduce: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce)
    x, y = _turned(4)
    program = fxdp.plan(Turned().float(), (x.float(), y), mp_policy=policy, **_SLOW)
    (row,) = [row for row in program.collectives() if row.words == "gathered"]
    assert "factors of " in row.text
    assert row.dtype == "bfloat16"


def _train(options: dict[str, Any]) -> list[float]:
    """Errors of each step's gradients, and of the parameters at last, with gradients accumulated at times."""
    torch.set_default_dtype(torch.float64)
    try:
        errors = []
        for model, draw in ((Words(), _words), (Turned(), _turned)):
            twin, rank = counterpart_of(model), dist.get_rank()
            compiled = fxdp.compile(model, **_SLOW, **options)
            ours, theirs = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (compiled, twin))
            for step, split in enumerate(_SPLITS * 2):
                torch.manual_seed(step)
                x, y = draw(sum(split))
                compiled(part(x, split, rank), part(y, split, rank)).backward()
                twin(x, y).backward()
                if options.get("strategy") is None:
                    errors.append(max(gradient_errors(compiled, twin)))
                if step % 3:
                    for optimizer in (ours, theirs):
                        optimizer.step()
                        optimizer.zero_grad()
            states = compiled.state_dict(), twin.state_dict()
            errors += [float((_full(states[0][k]) - v).abs().max()) for k, v in states[1].items()]
        return errors
    finally:
        torch.set_default_dtype(torch.float32)


def _full(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.parametrize(
    "options", [{}, {"backend": "eager"}, {"strategy": "shard", "backend": "eager"}], ids=str
)
def test_three_ranks_train_as_one_device(ranks: RankPool, options: dict[str, Any]) -> None:
    for errors in ranks.run(3, _train, options):
        assert max(errors) < 1e-11


def _grow() -> list[tuple[float, bool, int]]:
    """Of calls with more and more samples, and few again: the error, whether factors travel, and programs."""
    torch.set_default_dtype(torch.float64)
    try:
        model, found = Turned(), []
        twin, rank = counterpart_of(model), dist.get_rank()
        compiled = fxdp.compile(model, backend="eager", **_SLOW)
        for split in ([3, 3], [5, 5], [30, 31], [2, 4], [90, 1]):
            x, y = _turned(sum(split))
            dist.broadcast(x, 0)
            dist.broadcast(y, 0)
            for one in (compiled, twin):
                one.zero_grad()
            compiled(part(x, split, rank), part(y, split, rank)).backward()
            twin(x, y).backward()
            gathers = any(row.op == "all_gather" for row in compiled.plan.communication)
            found.append((max(gradient_errors(compiled, twin)), gathers, compiled._programs.compiled))
        return found
    finally:
        torch.set_default_dtype(torch.float32)


def test_many_more_samples_have_a_program_of_their_own(ranks: RankPool) -> None:
    for found in ranks.run(2, _grow):
        assert max(error for error, *_ in found) < 1e-12
        assert [gathers for _, gathers, _ in found] == [True, True, False, True, False]
        assert [count for *_, count in found] == [1, 2, 3, 3, 3]
