"""The stack on a node of an export is the text that torch writes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import proxy

from fxdp.startup.memoized.memoized_stacks import memoized_stacks


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a = x + 1; b = a * 2  # fmt: skip  # noqa: E702 - two nodes of one line
        return (
            a
            - b
        )  # fmt: skip


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Inner() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.inner:
            x = inner(x)
        return self._later(x, 3)

    def _later(self, x: Tensor, times: int) -> Tensor:
        return x.relu() if times == 0 else self._later(x, times - 1)


def _stacks() -> list[str | None]:
    graph = torch.export.export(Outer(), (torch.ones(2),), strict=False).graph
    return [node.stack_trace for node in graph.nodes if node.op == "call_function"]


def test_stacks_are_torch_s_own() -> None:
    wanted = _stacks()
    with memoized_stacks():
        assert _stacks() == wanted
    assert len(wanted) == 10
    assert "x = inner(x)" in (wanted[0] or "")


def test_torch_is_put_back() -> None:
    before = proxy.CapturedTraceback
    with memoized_stacks():
        assert proxy.CapturedTraceback is not before
    assert proxy.CapturedTraceback is before
