from __future__ import annotations

import torch

from fxdp.ir.graph.outputs_behind import outputs_behind
from fxdp.ir.graph.signature import Gradient, Input, Output, Parameter, Tangent
from fxdp.ir.types.placements import R
from tests.graphs import Sketch

aten = torch.ops.aten


def test_the_outputs_behind_gradients() -> None:
    g = Sketch()
    w, x = g.add(Parameter("w"), "f32[2]", R), g.add(Input(0, "x"), "f32[2]", R)
    first, third = g.add(Tangent(0), "f32[2]", R), g.add(Tangent(2), "f32[2]", R)

    def call(op: torch._ops.OpOverload, *args: torch.fx.Node) -> torch.fx.Node:
        return g.call(op, *args, type="f32[2]", at=R, reads=(R,) * len(args))

    y = call(aten.mul.Tensor, w, x)
    nothing = call(aten.zeros_like.default, first)  # of `floor`: on one device there is a gradient
    gm = g.returns(
        {
            Output(0): y,
            Output(2): y,
            Gradient(Parameter("w")): call(aten.add.Tensor, nothing, call(aten.mul.Tensor, x, third)),
            Gradient(Parameter("v")): nothing,
            Gradient(Input(0, "x")): call(aten.ones_like.default, w),
        }
    )
    assert outputs_behind(gm.graph) == {
        Parameter("w"): frozenset({0, 2}), Parameter("v"): frozenset({0}), Input(0, "x"): frozenset()
    }  # fmt: skip
