"""Nodes in an order that edges alone decide: whatever the order of the code, the same text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxdp.capture.captured import Captured
from fxdp.capture.joint.one_order import in_one_order
from fxdp.ir.graph.graph_text import graph_text
from fxdp.ir.graph.metadata import meta
from tests.capturing import capture


class Kinds(nn.Module):
    """A table and a running mean for each kind, in the order in which a set would give them."""

    def __init__(self, kinds: Sequence[str], drop: float = 0.0) -> None:
        super().__init__()
        self.kinds, self.drop = kinds, drop
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        for kind in kinds:
            self.register_buffer(f"{kind}_scale", torch.full((4,), float(len(kind))))
            self.register_buffer(f"{kind}_mean", torch.zeros(4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        tables = {}
        for kind in self.kinds:
            table = torch.cos(getattr(self, f"{kind}_scale") * x.mean(0))
            tables[kind] = F.dropout(table, self.drop) if self.drop else table
            getattr(self, f"{kind}_mean").lerp_(table.detach(), 0.1)
        hidden = self.first(x) * tables["full"]
        return F.mse_loss(self.last(hidden.relu()) * tables["sliding"] + tables["other"], target)


ORDERS = (("full", "sliding", "other"), ("other", "full", "sliding"), ("sliding", "other", "full"))


def _captured(kinds: Sequence[str], drop: float = 0.0) -> Captured:
    return capture(Kinds(kinds, drop), (torch.randn(6, 4), torch.randn(6, 4)), {})


def _text(found: Captured) -> str:
    return graph_text(found.gm, {}, exact=True)


def test_whatever_the_order_of_the_code() -> None:
    found = [_captured(kinds) for kinds in ORDERS]
    assert len(set(map(_text, found))) == len(ORDERS)
    ordered = [in_one_order(one) for one in found]
    assert len(set(map(_text, ordered))) == 1
    assert _text(in_one_order(ordered[0])) == _text(ordered[0])
    ordered[0].gm.graph.lint()


def test_nothing_is_lost_and_the_forward_comes_first() -> None:
    found = _captured(ORDERS[0])
    ordered = in_one_order(found)
    before, after = ([n for n in one.gm.graph.nodes if n.op == "call_function"] for one in (found, ordered))
    assert sorted(str(node.target) for node in before) == sorted(str(node.target) for node in after)
    backward = [meta(node).backward for node in after]
    assert backward == sorted(backward)


@pytest.mark.parametrize("kinds", ORDERS[1:])
def test_draws_stay_in_the_order_of_the_code(kinds: Sequence[str]) -> None:
    """One device would draw other numbers in another order."""
    first, other = (in_one_order(_captured(order, drop=0.5)) for order in (ORDERS[0], kinds))
    assert _text(first) != _text(other)
