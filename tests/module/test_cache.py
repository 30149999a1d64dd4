"""Calls that differ in Python values: each has its program, and not all are kept."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.module.cache import LRU


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor, power: int = 1, style: Any = None) -> Tensor:
        return self.fc(x).pow(power).mean()


@pytest.mark.parametrize("options", [{}, {"pipeline": {"microbatches": 2}}], ids=["full", "staged"])
def test_programs_of_the_kinds_called_last_are_kept(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("fxdp.module.cache_entry._KINDS", 2)
    model = Net()
    compiled = fxdp.compile(model, backend="eager", **options)
    x = torch.randn(4, 3)
    graphs = []
    for power in (1, 2, 2, 3, 1):
        torch.testing.assert_close(compiled(x, power), model(x, power))
        graphs.append(weakref.ref(compiled.program))
    assert compiled._programs.compiled == 4  # the second 2 was known, the second 1 was not
    gc.collect()
    assert [graph() is None for graph in graphs] == [True, True, True, False, False]


def test_values_that_change_at_each_call_are_named(caplog: pytest.LogCaptureFixture) -> None:
    compiled = fxdp.compile(Net(), backend="eager")
    with caplog.at_level(logging.WARNING, "fxdp"):
        for batch, style in ((2, "a"), (3, "a"), (2, "b"), (4, "b"), (2, object())):
            assert not caplog.text
            compiled(torch.randn(batch, 3), 1, style=style)
    (record,) = caplog.records
    assert record.getMessage().startswith("style (object) has another value than before")


def test_what_was_used_last_is_kept() -> None:
    recent: LRU[str, int] = LRU(2)
    recent["a"], recent["b"] = 1, 2
    assert recent.get("a") == 1
    recent["c"] = 3
    assert (recent.get("a"), recent.get("b"), recent.get("c")) == (1, None, 3)
    assert len(recent) == 2
    assert "b" not in recent
    recent["a"] = 4
    assert (recent.get("a"), len(recent)) == (4, 2)
