from __future__ import annotations

import operator

import torch
from expecttest import assert_expected_inline

from fxdp.ir.graph.signature import Input, Output
from fxdp.passes.expose_counts import ExposeCounts
from tests.graphs import Sketch, after

aten = torch.ops.aten


def _loss(weight: bool) -> Sketch:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 3]")
    y = g.add(Input(1, "y"), "i64[B]")
    w = g.add(Input(2, "w"), "f32[3]") if weight else None
    loss = g.call(aten.nll_loss_forward.default, x, y, w, 2, -100, type="(f32[], f32[])")
    total = g.call(operator.getitem, loss, 1, type="f32[]")
    g.returns({Output(0): g.call(aten.reciprocal.default, total, type="f32[]")})
    return g


def test_the_count_comes_from_the_targets() -> None:
    g = _loss(weight=False)
    assert_expected_inline(
        after(ExposeCounts(), torch.fx.GraphModule({}, g.graph)),
        """\
mesh(dp=2)
  %x: f32[B, 3] = input(x)
  %y: i64[B] = input(y)
  %nll_loss_forward_default: (f32[], f32[]) = aten.nll_loss_forward(%x, %y, None, 2, -100)
  %getitem: f32[] = getitem(%nll_loss_forward_default, 1)
  %ne_scalar: b8[B] = aten.ne.Scalar(%y, -100)
  %_to_copy_default: f32[B] = aten._to_copy(%ne_scalar, dtype=f32)
  %sum_default: f32[] = aten.sum(%_to_copy_default)
  %reciprocal_default: f32[] = aten.reciprocal(%sum_default)
  return output 0=%reciprocal_default
""",
    )


def test_the_weights_of_classes_count() -> None:
    g = _loss(weight=True)
    assert_expected_inline(
        after(ExposeCounts(), torch.fx.GraphModule({}, g.graph)),
        """\
mesh(dp=2)
  %x: f32[B, 3] = input(x)
  %y: i64[B] = input(y)
  %w: f32[3] = input(w)
  %nll_loss_forward_default: (f32[], f32[]) = aten.nll_loss_forward(%x, %y, %w, 2, -100)
  %getitem: f32[] = getitem(%nll_loss_forward_default, 1)
  %ne_scalar: b8[B] = aten.ne.Scalar(%y, -100)
  %_to_copy_default: f32[B] = aten._to_copy(%ne_scalar, dtype=f32)
  %mul_tensor: i64[B] = aten.mul.Tensor(%y, %ne_scalar)
  %index_tensor: f32[B] = aten.index.Tensor(%w, [%mul_tensor])
  %mul_tensor_1: f32[B] = aten.mul.Tensor(%_to_copy_default, %index_tensor)
  %sum_default: f32[] = aten.sum(%mul_tensor_1)
  %reciprocal_default: f32[] = aten.reciprocal(%sum_default)
  return output 0=%reciprocal_default
""",
    )
