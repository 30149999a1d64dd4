"""What stands in the arguments of a part, and what a call fills in."""

from __future__ import annotations

import torch

from fxdp.ir.graph.signature import Constant, Input, Output, Parameter, StageValue, Tangent
from fxdp.ir.types.placements import R, S
from fxdp.runtime.template import CallFrame, TangentSpec
from tests.graphs import Sketch

aten = torch.ops.aten


def _template(weight: torch.Tensor) -> CallFrame:
    g = Sketch()
    w, rows = g.add(Parameter("w"), "f32[]", R), g.add(Constant("<rows>"), "i64[B]", R)
    x, h = g.add(Input(1, "x"), "f32[B]", S(0)), g.add(StageValue("h"), "f32[B]", S(0))
    size, back = g.size("B"), g.add(StageValue("g", backward=True), "f32[B]", S(0))
    g.add(Tangent(0), "f32[B]", S(0))
    y = g.call(aten.mul.Tensor, w, x, type="f32[B]", at=S(0), reads=(R, S(0)))
    for other in (rows, h, size, back):
        assert other is not None
    return CallFrame.of(g.returns({Output(0): y}), {Parameter("w"): weight})


def test_each_slot_has_its_place() -> None:
    weight, x, h, rows = torch.tensor(2.0), torch.ones(2), torch.zeros(2), torch.tensor([0, 1])
    template = _template(weight)
    inputs = (torch.empty(0), x)
    values = template.filled(inputs, {"B": 2}, {"": rows}, {"h": h})
    assert sorted(map(id, values)) == sorted(map(id, [weight, rows, x, h, 2]))
    assert template.tangents == ("g", TangentSpec(0, torch.float32, sharded=True))


def test_what_is_fixed_for_all_calls_of_one_size_is_filled_in_once() -> None:
    template, rows = _template(torch.tensor(2.0)), torch.tensor([0, 1])
    fixed = template.with_numbers({"B": 2}, {"": rows})
    assert (fixed.sizes, fixed.rows) == ((), ())
    x, h = torch.ones(2), torch.zeros(2)
    given = {"crossing": {"h": h}}
    wanted = template.filled((x, x), {"B": 2}, {"": rows}, **given)
    assert all(a is b for a, b in zip(fixed.filled((x, x), **given), wanted, strict=True))
