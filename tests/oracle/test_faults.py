"""Wrong rules and passes: `fxdp.verify` names the node at which each goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxdp
from fxdp.ir.graph.graph_text import target_text
from fxdp.ir.ops.library import aten
from fxdp.ir.types.placements import P, R, S
from fxdp.oracle import rank_draws
from fxdp.rules.registry import Alternative, Op, registry
from tests import faults
from tests.faults import Seed

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)


class Pairs(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x, x], 1)
        scores = y @ y.t()
        return scores.square().sum() + self.fc(x).sum()


class Sum(Net):
    def forward(self, x: Tensor) -> Tensor:
        total = self.fc(x).sum(0)
        return total.tanh()


class Largest(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = self.fc(x).sum(0)
        return total.argmax(), x.sum()


class Mean(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).square().mean()


class Views(Net):
    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.fc(x), 2 * x])
        return both.sort(0).values


class Noise(Net):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape[0], 64)
        return self.fc(x) * noise.mean(1, keepdim=True)


class Groups(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(self.fc(x), 2).square().sum()


class PerSample(Net):
    def forward(self, x: Tensor) -> Tensor:
        total = self.fc(x).square().sum()
        return total / x.shape[0]


class OwnRows(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)[torch.arange(x.shape[0]), x.argmax(1)].square()


@dataclass(frozen=True)
class Case:
    """A fault, a model that meets it, and how the first faulty node reads.

    `op` is its op, `code` is in its source line, and `says` is in its message.
    """

    seed: Seed
    net: type[nn.Module]
    op: str
    code: str
    placement: str
    says: str = "differs from one device"


def _same_seed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rank_draws, "rank_seed", lambda seed, rank: seed)


def _other_dim(op: Op, a: Alternative) -> Alternative:
    return replace(a, outputs=(S(1),)) if a.outputs == (S(0),) else a


def _no_outer(op: Op, a: Alternative) -> Alternative:
    return replace(a, outputs=(S(0),)) if a.outputs == (S(0, 2),) else a


def _no_partial(op: Op, a: Alternative) -> Alternative:
    return replace(a, outputs=(R,)) if a.outputs == (P,) else a


INSERTED, LOCALIZED = faults.AFTER_INSERTION, faults.AFTER_LOCALIZATION

CASES = {
    "wrong dim of a shard": Case(
        faults.rule(aten.mm.default, _other_dim),
        Pairs, "aten.mm", "y @ y.t()", "S(1)", "has shape (5, 8), expected (8, 5)",
    ),
    "partial dropped by a rule": Case(
        faults.rule(aten.sum.dim_IntList, _no_partial),
        Sum, "aten.sum.dim_IntList", "self.fc(x).sum(0)", "R",
    ),
    "mean of the ranks' terms instead of their sum": Case(
        faults.after(INSERTED, faults.averaging), Mean, "all_reduce", "mean()", "R",
    ),
    "parts gathered in the wrong order": Case(
        faults.after(INSERTED, faults.gathering_in_the_wrong_order),
        Views, "all_gather", "torch.cat([self.fc(x), 2 * x])", "R",
    ),
    "random numbers shared between the ranks": Case(
        _same_seed, Noise, "aten.rand", "torch.rand(x.shape[0], 64)", "S(0)", "draw the same",
    ),
    "localized size left global": Case(
        faults.rule(aten.native_group_norm.default, faults.without_rewrite),
        Groups, "aten.native_group_norm", "F.group_norm(", "S(0), S(0), S(0)", "cannot run",
    ),
    "global size made local": Case(
        faults.after(LOCALIZED, faults.dividing_by_the_local_batch),
        PerSample, "aten.div.Tensor", "total / x.shape[0]", "R",
    ),
    "offset forgotten": Case(
        faults.rule(aten.index.Tensor, faults.without_rewrite),
        OwnRows, "aten.index.Tensor", "[torch.arange(x.shape[0])", "S(0)", "cannot run",
    ),
    "reduced twice": Case(
        faults.after(INSERTED, faults.reducing_twice), Mean, "all_reduce", "mean()", "R",
    ),
    "wrong outer factor": Case(
        faults.rule(aten.cat.default, _no_outer),
        Views, "aten.cat", "torch.cat([self.fc(x), 2 * x])", "S(0)",
    ),
    "partial through a nonlinear op": Case(
        faults.extra(aten.argmax.default, lambda op: op.alternative({0: P}, P)),
        Largest, "aten.argmax", "total.argmax()", "P(sum)",
    ),
    "gradient not reduced": Case(
        faults.rule(aten.mm.default, _no_partial),
        Mean, "aten.mm", "self.fc(x).square()", "R",
    ),
    "reduction left out": Case(
        faults.after(INSERTED, faults.keeping_each_term),
        Sum, "aten.tanh", "total.tanh()", "R",
    ),
}  # fmt: skip


def _rule_of(op: str) -> str:
    """The rule that places an op; redistributions have none."""
    rules = {target_text(target): registry[target].name for target in registry.targets()}
    return rules.get(op, "redistribute")


def _verify(case: Case) -> fxdp.Report:
    torch.manual_seed(0)
    return fxdp.verify(case.net(), (X,), mesh={"dp": 4}, splits=[[5, 2, 0, 1], [2, 2, 2, 2]])


@pytest.mark.parametrize("name", CASES)
def test_the_fault_is_located(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    assert _verify(case).ok, "the model is right without the fault"
    case.seed(monkeypatch)
    report = _verify(case)
    fault = report.first_fault
    assert not report.ok
    assert fault is not None, str(report)
    assert f" = {case.op}(" in fault.text, str(report)
    assert case.code in fault.location.code, str(report)
    assert (fault.rule, fault.placement) == (_rule_of(case.op), case.placement), str(report)
    assert case.says in fault.what, str(report)
    assert all(operand.error is None or operand.error <= 1e-9 for operand in fault.operands)
    with pytest.raises(fxdp.ExactnessError, match="first differing node"):
        report.raise_if_wrong()
