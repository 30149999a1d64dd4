"""Replicas that come apart: noticed within some calls, named; and what the comparison costs nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxdp
from tests.captures import captured_once
from tests.rank_pool import RankPool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return (self.last(self.norm(self.first(x))) * scale).square().mean()


class Plain(Net):
    """For micro-batches, which take no BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]


class _Loop:
    """A training loop whose rank 1 may do otherwise."""

    def __init__(self, kind: type[nn.Module] = Net, **options: Any) -> None:
        options = {"debug": {"check_replicas": 3}, **options}
        self.model = fxdp.compile(kind(), backend="eager", **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.calls = 0

    def step(self, x: Tensor | None = None, scale: float = 1.0) -> None:
        self.calls += 1
        x = torch.arange(12.0).view(4, 3) if x is None else x
        self.model(x, torch.tensor(scale)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _loaded(loop: _Loop) -> None:
    if dist.get_rank():
        loop.model.load_state_dict({n: t + 1 for n, t in loop.model.state_dict().items()})


def _other_rate(loop: _Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())


def _statistics(loop: _Loop) -> None:
    if dist.get_rank():
        loop.model.norm.running_mean.add_(1)


def _rounding(loop: _Loop) -> None:
    if dist.get_rank():
        with torch.no_grad():
            loop.model.first.weight.mul_(1 + 1e-6)


def _checkpoint_of_rank_0(loop: _Loop) -> None:
    if dist.get_rank() == 0:
        loop.model.state_dict()


def _said(change: Callable[[_Loop], None], steps: int = 4, at: int = 2, **options: Any) -> tuple[int, str]:
    """After how many calls, and how, a change on one rank before step `at` was noticed."""
    loop = _Loop(**options)
    try:
        for i in range(steps):
            if i == at:
                change(loop)
            loop.step()
    except fxdp.FxdpError as error:
        return loop.calls, f"{type(error).__name__}: {error}"
    return loop.calls, "no error"


def _in_a_pipeline() -> list[str]:
    """Other samples, other targets, an input without a batch dim: at the call that compares."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    found = []
    rank = dist.get_rank()
    for x, scale in ((1.0 * rank, 1.0), (0.0, 1.0 + rank), (0.0, 1.0)):
        loop = _Loop(Plain, mesh=mesh, pipeline={"microbatches": 2})
        loop.step()
        loop.step()
        try:
            loop.step(torch.full((4, 3), x), scale)
            found.append("no error")
        except fxdp.InputError as error:
            found.append(str(error))
    return found


def _faults() -> dict[str, Any]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fxdp").addHandler(handler)
    with captured_once():
        found: dict[str, Any] = {
            "loaded": _said(_loaded),
            "another rate": _said(_other_rate, 7),
            "statistics": _said(_statistics),
            "without exchange": _said(_loaded, communication={"uneven": False}),
            "never": _said(_loaded, debug={"check_replicas": 0}),
            "nothing": _said(lambda _: None, 7),
            "rank 0's checkpoint": _said(_checkpoint_of_rank_0, 24),
            "rounding": (_said(_rounding, 7), [r for r in records if "rounding" in r]),
            "at eval": _at_eval(),
            "pipeline": _in_a_pipeline(),
            "another rate at once": _said(_other_rate, at=0, debug={}),
            "loaded later": _said(_loaded, 9, at=6, debug={}),
        }
    logging.getLogger("fxdp").removeHandler(handler)
    return found


def _at_eval() -> tuple[int, str]:
    """The first call in evaluation compares, long before its turn: after call 32 that is 64."""
    loop = _Loop(debug={"check_replicas": 1000})
    try:
        for _ in range(52):
            loop.step()
        _loaded(loop)
        loop.model.eval()
        loop.step()
    except fxdp.AgreementError as error:
        return loop.calls, str(error)
    return loop.calls, "no error"


@pytest.fixture(scope="module")
def said(ranks: RankPool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ranks.run(2, _faults)
    return found


@pytest.mark.parametrize(
    ("case", "calls", "before", "name"),
    [
        ("loaded", 3, 2, "parameter first.weight"),
        ("another rate", 4, 3, "parameter norm.weight"),  # what BatchNorm cancels is apart by rounding
        ("statistics", 3, 2, "buffer norm.running_mean"),
        ("without exchange", 3, 2, "parameter first.weight"),
        ("another rate at once", 2, 1, "parameter norm.weight"),
        ("loaded later", 8, 4, "parameter first.weight"),
    ],
)
def test_replicas_that_come_apart(
    said: list[dict[str, Any]], case: str, calls: int, before: int, name: str
) -> None:
    for found in said:
        when, words = found[case]
        assert when == calls
        assert words.startswith("AgreementError: the model is no longer the same on all ranks: "), words
        assert f"rank 1 holds other values of the {name} than rank 0" in words
        assert f"they were equal at call {before}" in words


def test_evaluation_begins_with_a_comparison(said: list[dict[str, Any]]) -> None:
    for found in said:
        calls, words = found["at eval"]
        assert calls == 53
        assert "rank 1 holds other values of the parameter first.weight" in words


def test_what_is_no_fault(said: list[dict[str, Any]]) -> None:
    for found in said:
        assert found["never"] == (4, "no error")
        assert found["nothing"] == (7, "no error")
        assert found["rank 0's checkpoint"] == (24, "no error")


def test_rounding_becomes_equal_again_with_a_warning(said: list[dict[str, Any]]) -> None:
    for found in said:
        (calls, words), warned = found["rounding"]
        assert (calls, words) == (7, "no error")
        assert len(warned) == 1, warned
        assert "were not the same on all ranks, by up to 9e-07 of their size, which is rounding" in warned[0]


def test_ranks_of_a_pipeline_that_pass_other_values_later(said: list[dict[str, Any]]) -> None:
    for found in said:
        samples, scale, equal = found["pipeline"]
        assert "rank 1 of the mesh passes other samples than rank 0" in samples
        assert "scale of the inputs has no batch dim, but its values differ" in scale
        assert equal == "no error"
