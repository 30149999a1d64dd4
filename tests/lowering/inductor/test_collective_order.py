"""Halves run their collectives in the joint graph's order."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxdp.lowering.halves import Halves
from fxdp.lowering.inductor.collective_order import collectives, order_lines, put_in_order

_c10d = torch.ops._c10d_functional


def _half(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    first = _c10d.wait_tensor.default(_c10d.all_reduce.default(torch.neg(x), "sum", "group"))
    second = _c10d.wait_tensor.default(_c10d.all_reduce.default(torch.exp(y), "sum", "group"))
    third = _c10d.wait_tensor.default(_c10d.all_gather_into_tensor.default(second + y, 2, "group"))
    return first, second, third


def test_collectives_go_after_what_they_need_in_the_order_that_is_wanted() -> None:
    gm = fx.symbolic_trace(_half)
    names = collectives(gm.graph)
    assert len(names) == 3
    before = [node.name for node in gm.graph.nodes]
    put_in_order(gm, names)
    assert [node.name for node in gm.graph.nodes] == before
    second, third, first = [*names[1:], names[0]]
    put_in_order(gm, ["of another half", second, third, first])
    assert collectives(gm.graph) == [second, third, first]
    assert sorted(node.name for node in gm.graph.nodes) == sorted(before)
    assert gm.graph.output_node() == list(gm.graph.nodes)[-1]


def test_the_order_as_text() -> None:
    gm = fx.symbolic_trace(_half)
    names = collectives(gm.graph)
    lines = order_lines(Halves(lambda _: [], 3, gm, gm))
    assert lines == [f"{half}: {name}" for half in ("forward", "backward") for name in names]
