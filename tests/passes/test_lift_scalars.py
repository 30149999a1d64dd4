from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from fxdp.ir.graph.signature import Input, Output
from fxdp.passes.lift_scalars import LiftScalars
from tests.graphs import Sketch, after

aten = torch.ops.aten


def test_numbers_become_tensors() -> None:
    """Those of scalars in full precision: other sums are no terms of a loss, or would be rounded twice."""
    g = Sketch()
    x, half = g.add(Input(0, "x"), "f64[B, 3]"), g.add(Input(1, "half"), "bf16[B]")
    total = g.call(aten.sum.default, x, type="f64[]")
    rest = g.call(aten.rsub.Scalar, total, 1, type="f64[]")
    more = g.call(aten.add.Tensor, rest, 0.5, type="f64[]")
    rows = g.call(aten.add.Tensor, x, 1, type="f64[B, 3]")
    rounded = g.call(aten.add.Tensor, g.call(aten.sum.default, half, type="bf16[]"), 0.1, type="bf16[]")
    g.returns({Output(0): more, Output(1): rows, Output(2): rounded})
    assert_expected_inline(
        after(LiftScalars(), torch.fx.GraphModule({}, g.graph)),
        """\
mesh(dp=2)
  %x: f64[B, 3] = input(x)
  %half: bf16[B] = input(half)
  %sum_default: f64[] = aten.sum(%x)
  %full_default: f64[] = aten.full([], 1, dtype=f64)
  %rsub_scalar: f64[] = aten.rsub.Tensor(%sum_default, %full_default)
  %full_default_1: f64[] = aten.full([], 0.5, dtype=f64)
  %add_tensor: f64[] = aten.add.Tensor(%rsub_scalar, %full_default_1)
  %add_tensor_1: f64[B, 3] = aten.add.Tensor(%x, 1)
  %sum_default_1: bf16[] = aten.sum(%half)
  %add_tensor_2: bf16[] = aten.add.Tensor(%sum_default_1, 0.1)
  return output 0=%add_tensor, output 1=%add_tensor_1, output 2=%add_tensor_2
""",
    )
