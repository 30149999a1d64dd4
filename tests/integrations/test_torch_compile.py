"""`torch.compile(backend="fxdp")` says what to use instead."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxdp.integrations.torch_compile import backend

GROUP = "torch_dynamo_backends"


def test_torch_finds_it_by_its_name() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"][GROUP].items()
    assert name == "fxdp"
    assert EntryPoint(name, value, GROUP).load() is backend


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (None, r"Use compiled = fxdp\.compile\(model\), which"),
        ({"microbatches": 2, "compute": "eager"}, r"fxdp\.compile\(model, microbatches=2, compute='eager'\)"),
        ({"stategy": "shard"}, r"there is no option 'stategy'; did you mean 'strategy'\?"),
    ],
)
def test_it_is_refused_with_the_line_to_use(options: Any, message: str) -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend=backend, options=options)
    with pytest.raises(Exception, match=message):
        compiled(torch.randn(3, 2))
