from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Input, Output
from fxdp.ir.types.placements import Shard
from fxdp.ir.types.sizes import axis
from fxdp.ir.types.value_types import TensorType
from fxdp.passes.count_masked_rows import CountMaskedRows
from tests.graphs import Sketch, after

aten = torch.ops.aten


def test_the_number_of_rows_comes_from_the_mask() -> None:
    g, rows = Sketch(), Shard(0)
    x, mask = g.add(Input(0, "x"), "f32[B, 3]", rows), g.add(Input(1, "mask"), "b8[B]", rows)
    chosen = g.call(aten.index.Tensor, x, [mask], type="f32[B, 3]", at=rows, reads=(rows, rows))
    meta(chosen).type = TensorType(torch.float32, (axis("u0").total, 3))
    number = g.call(aten.sym_size.int, chosen, 0, type="int(b)")
    zeros = g.call(aten.new_zeros.default, x, [number], type="f32[B]", at=rows, reads=(rows,))
    g.returns({Output(0): chosen, Output(1): zeros})
    assert_expected_inline(
        after(CountMaskedRows(), torch.fx.GraphModule({}, g.graph)),
        """\
mesh(dp=2)
  %x: f32[B, 3] {dp=S(0)} = input(x)
  %mask: b8[B] {dp=S(0)} = input(mask)
  %index_tensor: f32[B_u0, 3] {dp=S(0)} = aten.index.Tensor(%x, [%mask])
  %nonzero_default: i64[B_u0, 1] {dp=S(0)} = aten.nonzero(%mask)
  %sym_size_int: int(b) = aten.sym_size.int(%nonzero_default, 0)
  %new_zeros_default: f32[B] {dp=S(0)} = aten.new_zeros(%x, [%sym_size_int])
  return output 0=%index_tensor, output 1=%new_zeros_default
""",
    )
