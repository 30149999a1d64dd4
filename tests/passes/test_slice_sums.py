from __future__ import annotations

from expecttest import assert_expected_inline

from fxdp.ir import redistributions
from fxdp.ir.graph.signature import Input, Output
from fxdp.ir.types.placements import P, S
from fxdp.passes.slice_sums import SliceSums
from tests.graphs import Sketch, after


def test_a_part_of_a_sum() -> None:
    """The gradient of gathered features: each rank had its part, now each block slices its own."""
    g = Sketch()
    terms = g.add(Input(0, "terms"), "f32[B, 4]", P)
    pending = g.call(
        redistributions.reduce_scatter, terms, 0, 1, 1, type="f32[B, 4]", at=S(0), reads=(P,), name="pending"
    )
    part = g.call(redistributions.wait, pending, type="f32[B, 4]", at=S(0), reads=(S(0),), name="part")
    assert_expected_inline(
        after(SliceSums(), g.returns({Output(0): part})),
        """\
mesh(dp=2)
  %terms: f32[B, 4] {dp=P(sum)} = input(terms)
  %all_reduce: f32[B, 4] {dp=R} = all_reduce(%terms, sum)
  %part: f32[B, 4] {dp=R} = wait(%all_reduce)
  %shard: f32[B, 4] {dp=S(0)} = shard(%part, 0, 1)
  return output 0=%shard
""",
    )
