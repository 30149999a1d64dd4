"""A model that cannot be captured: its plan has what is known all the same, with the error in its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.cli.parser import main

SOURCE = """
import torch
class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)
    def forward(self, x):
        return x.mean() if self.fc(x).sum() > 0 else x.sum()
def make():
    return {"model": Branches(), "args": (torch.randn(4, 8),), "strategy": "shard"}
"""


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x.mean() if self.fc(x).sum() > 0 else x.sum()


def test_a_partial_plan() -> None:
    with pytest.raises(fxdp.CaptureError, match=r"test_partial_plan\.py:\d+ `return x\.mean\(\)") as caught:
        fxdp.plan(Branches(), (torch.randn(4, 8),), mesh={"dp": 4}, strategy="shard")
    plan = caught.value.plan
    assert isinstance(plan, fxdp.Plan)
    assert repr(plan) == "Plan(Branches on mesh(dp=4), a batch of 16: the model cannot be captured)"
    shown = str(plan)
    assert max(map(len, shown.splitlines())) <= 80
    assert "data-dependent control flow" in shown
    assert shown.endswith("2 parameters, 288 B, of which a rank holds 72 B")
    assert [(row.name, row.placement, row.held) for row in plan.parameters()] == [
        ("fc.weight", "ParamShard", 64), ("fc.bias", "ParamShard", 8),
    ]  # fmt: skip
    assert "data-dependent control flow" in plan._repr_html_()
    assert fxdp.Plan.from_json(plan.to_json()) == plan


def test_the_command_writes_it_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "branching.py", tmp_path / "page.html"
    file.write_text(SOURCE)
    assert main(["plan", f"{file}:make", "--json", "--html", str(page)]) == 2
    out, err = capsys.readouterr()
    assert "branching.py:8" in json.loads(out)["error"]
    assert "branching.py:8" in err
    assert "The model cannot be captured" in page.read_text()
    assert "What each line exchanges" not in page.read_text()
