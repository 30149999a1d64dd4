"""The coverage report: what does not split over the ranks, and what to do about it."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import fxdp
from fxdp.reports.coverage import Coverage

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
FULL = "gathered, runs replicated"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)


class Splits(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.layer_norm(self.fc(x), (5,))).square().mean()


class Pairs(Net):
    def forward(self, x: Tensor) -> Tensor:
        scores = self.fc(x) @ self.fc(2 * x).t()
        return F.cross_entropy(scores, torch.arange(x.shape[0]))


class Sorted(Net):
    def forward(self, x: Tensor) -> Tensor:
        ordered = self.fc(x).sort(0).values
        return (ordered.cumsum(0) * 2).tanh().sum()


class Distinct(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)[x[:, 0].long().unique()].square().mean()


class Shuffled(Net):
    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x)[torch.randperm(x.shape[0])] * self.fc(x)).sum()


class Whole(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)[:-1]


@torch.library.custom_op("fxdp_test::unruled", mutates_args=())
def unruled(x: Tensor) -> Tensor:
    return x * 2


@unruled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Unknown(Net):
    def forward(self, x: Tensor) -> Tensor:
        return unruled(self.fc(x).detach()).mean()


def covered(net: type[nn.Module], ranks: int = 2) -> Coverage:
    return fxdp.plan(net(), (X,), mesh={"dp": ranks}).coverage()


def test_what_splits_is_not_listed() -> None:
    report = covered(Splits)
    assert not report
    assert report.bytes == 0
    assert str(report).startswith("everything splits over the ranks")
    assert not covered(Sorted, ranks=1)


@pytest.mark.parametrize(
    ("net", "op", "what", "phase", "cause", "remedy", "code"),
    [
        (Pairs, "aten.mm", "gathered", "forward", "pairs every sample", "contrastive", "self.fc(x) @"),
        (Sorted, "aten.sort", FULL, "forward", "along the batch", "within a sample", ".sort(0)"),
        (Distinct, "aten._unique2", FULL, "forward", "only the data", "torch.where", ".unique()"),
        (Shuffled, "aten.index.Tensor", FULL, "forward", "any sample's row", "torch.arange", "randperm"),
        (Shuffled, "aten.index_put", FULL, "backward", "any sample's row", "torch.arange", "randperm"),
        (Whole, "aten.slice.Tensor", FULL, "forward", "by their number", "neighbours", "[:-1]"),
        (Unknown, "fxdp_test.unruled", FULL, "forward", "no placement rule", "register_rule", "unruled("),
    ],
)  # fmt: skip
def test_a_row_says_what_where_why_and_what_to_do(
    net: type[nn.Module], op: str, what: str, phase: str, cause: str, remedy: str, code: str
) -> None:
    rows = {(row.op, row.what, row.phase): row for row in covered(net)}
    assert (op, what, phase) in rows, str(covered(net))
    row = rows[op, what, phase]
    assert cause in row.cause
    assert remedy in row.remedy
    assert code in row.location.code
    assert row.location.file.endswith("test_coverage.py")
    assert row.bytes > 0


def test_bytes_are_of_the_value_that_travels() -> None:
    (row,) = (row for row in covered(Sorted, ranks=4) if row.op == "aten.sort")
    assert row.bytes == 4 * len(X) * 5 * 4  # the global batch, five features, float32
    assert row.followers >= 3, "cumsum, mul and tanh read the sorted values"


def test_the_report_is_read_by_people_and_programs() -> None:
    report = covered(Pairs)
    assert len(report) == len(report.rows)
    assert f"{len(report)} places do not split" in str(report)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report)
    console.print(covered(Splits))
    shown = console.export_text()
    assert "contrastive" in shown
    assert "everything splits" in shown
    found = json.loads(json.dumps(report.as_dict()))
    assert found["bytes"] == report.bytes
    assert {"op", "what", "cause", "remedy", "bytes", "file", "line", "code", "module"} <= set(
        found["rows"][0]
    )


def test_a_compiled_module_has_it_too() -> None:
    compiled = fxdp.compile(Sorted(), backend="eager")
    compiled(X)
    assert not compiled.plan.coverage(), "one rank splits nothing"


def test_rows_of_gradients_are_marked() -> None:
    """By what they reduce, not by words: a gradient of an input is none of a parameter."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gradient = nn.Linear(3, 3)

        def forward(self, x: Tensor, shared: Tensor) -> Tensor:
            return (self.gradient(x) * shared).square().mean()

    shared: Any = torch.randn(3, requires_grad=True)
    plan = fxdp.plan(Reads(), (X, shared), mesh={"dp": 2}, batch_dims=((0, None), {}))
    marked = [row.cause for row in plan.causes if row.gradient]
    assert sorted(marked) == ["gradient of gradient.bias", "gradient of gradient.weight"]
    assert plan.gradient_bytes >= 4 * 12


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = unruled(self.fc(x).detach())
        return unruled(y.sum(0)).sum()


def test_strict_refuses_all_ops_without_a_rule_at_once() -> None:
    with pytest.raises(fxdp.PlacementError) as caught:
        fxdp.plan(Twice(), (X,), mesh={"dp": 2}, strict=True)
    message = str(caught.value)
    assert "2 ops have no placement rule" in message
    assert "`y = unruled(self.fc(x).detach())`\n    operands: %" in message
    assert ": f32[B, 5] {S(0)}" in message
    assert "`return unruled(y.sum(0)).sum()`\n    operands: %" in message
    assert ": f32[5] {" in message
    assert "fxdp.register_rule" in message
