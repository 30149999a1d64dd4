from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from fxdp.ir.graph.signature import Gradient, Input, Parameter
from fxdp.ir.types.placements import P, R, S
from fxdp.passes.cast_reductions import CastReductions
from fxdp.passes.insert_collectives import InsertCollectives
from tests.graphs import Sketch, after, mesh

aten = torch.ops.aten


def casting(dtype: torch.dtype | None) -> str:
    """Gradients of a bias that was cast to bfloat16, and of one that was not; their sums are in `dtype`."""
    g = Sketch()
    x = g.add(Input(0, "x"), "bf16[B, 4]", S(0))
    back = {"backward": True}
    narrow = g.call(aten.sum.dim_IntList, x, [0], type="bf16[4]", at=P, reads=(S(0),), name="narrow", **back)
    cast = g.call(aten._to_copy.default, narrow, type="f32[4]", at=P, reads=(P,), name="cast", **back)
    wide = g.call(aten.sum.dim_IntList, x, [0], type="f32[4]", at=P, reads=(S(0),), name="wide", **back)
    gradients = {Gradient(Parameter("cast")): cast, Gradient(Parameter("own")): wide}
    gm = g.returns(gradients, (R, R))
    return after(InsertCollectives(), CastReductions(dtype).run(gm, mesh()))


def test_a_sum_in_the_narrow_dtype_comes_before_the_cast_and_its_cause_is_the_gradient() -> None:
    assert_expected_inline(
        casting(torch.bfloat16),
        """\
mesh(dp=2)
  %x: bf16[B, 4] {dp=S(0)} = input(x)
  %narrow: bf16[4] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0])
  %all_reduce: bf16[4] {dp=R} = all_reduce(%narrow, sum)  # gradient of cast
  %wait: bf16[4] {dp=R} = wait(%all_reduce)
  %cast: f32[4] {dp=R} = aten._to_copy(%wait)
  %wide: f32[4] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0])
  %_to_copy_default: bf16[4] {dp=P(sum)} = aten._to_copy(%wide, dtype=bf16)
  %all_reduce_1: bf16[4] {dp=R} = all_reduce(%_to_copy_default, sum)  # gradient of own
  %wait_1: bf16[4] {dp=R} = wait(%all_reduce_1)
  %_to_copy_default_1: f32[4] {dp=R} = aten._to_copy(%wait_1, dtype=f32)
  return gradient param(cast)=%cast, gradient param(own)=%_to_copy_default_1
""",
    )


def test_a_sum_in_the_parameters_dtype_comes_after_the_cast() -> None:
    assert_expected_inline(
        casting(torch.float32),
        """\
mesh(dp=2)
  %x: bf16[B, 4] {dp=S(0)} = input(x)
  %narrow: bf16[4] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0])
  %cast: f32[4] {dp=P(sum)} = aten._to_copy(%narrow)
  %all_reduce: f32[4] {dp=R} = all_reduce(%cast, sum)  # gradient of cast
  %wide: f32[4] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0])
  %all_reduce_1: f32[4] {dp=R} = all_reduce(%wide, sum)  # gradient of own
  %wait: f32[4] {dp=R} = wait(%all_reduce)
  %wait_1: f32[4] {dp=R} = wait(%all_reduce_1)
  return gradient param(cast)=%wait, gradient param(own)=%wait_1
""",
    )
