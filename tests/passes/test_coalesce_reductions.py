from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import fx

from fxdp.compiler.verifier import verify
from fxdp.ir import redistributions
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import Cause, Location
from fxdp.ir.graph.signature import Input, Output
from fxdp.ir.types.placements import P, R, S
from fxdp.passes.coalesce_reductions import CoalesceReductions
from tests.graphs import Sketch, after

aten = torch.ops.aten


class Sums(Sketch):
    """Sums over the batch of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.add(Input(0, "x"), "f32[B, 2]", S(0))

    def start(self, name: str, type_: str = "f32[2]", dims: tuple[int, ...] = (0,)) -> fx.Node:
        value = self.call(
            aten.sum.dim_IntList, self.x, list(dims), type=type_, at=P, reads=(S(0),), name=name
        )
        cause = Cause("output", name, Location(), name)
        return self.call(redistributions.all_reduce, value, "sum", type=type_, at=R, reads=(P,), cause=cause)

    def wait(self, pending: fx.Node, type_: str = "f32[2]") -> fx.Node:
        return self.call(redistributions.wait, pending, type=type_, at=R, reads=(R,))


def test_sums_under_way_together_travel_together() -> None:
    sums = Sums()
    first, second = sums.start("total"), sums.start("count", "f32[]", (0, 1))
    done = sums.wait(first), sums.wait(second, "f32[]")
    gm = sums.returns({Output(0): done[0], Output(1): done[1]})
    text = after(CoalesceReductions(), gm)
    verify(gm, Level.LOCAL, "coalesce-reductions")
    assert_expected_inline(
        text,
        """\
mesh(dp=2)
  %x: f32[B, 2] {dp=S(0)} = input(x)
  %total: f32[2] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0])
  %count: f32[] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0, 1])
  %reshape_default: f32[2] {dp=P(sum)} = aten.reshape(%total, [2])
  %reshape_default_1: f32[1] {dp=P(sum)} = aten.reshape(%count, [1])
  %cat_default: f32[3] {dp=P(sum)} = aten.cat([%reshape_default, %reshape_default_1])
  %all_reduce_2: f32[3] {dp=R} = all_reduce(%cat_default, sum)  # 2 sums: total; count
  %wait_2: f32[3] {dp=R} = wait(%all_reduce_2)
  %slice_tensor: f32[2] {dp=R} = aten.slice.Tensor(%wait_2, 0, 0, 2)
  %view_default: f32[2] {dp=R} = aten.view(%slice_tensor, [2])
  %slice_tensor_1: f32[1] {dp=R} = aten.slice.Tensor(%wait_2, 0, 2, 3)
  %view_default_1: f32[] {dp=R} = aten.view(%slice_tensor_1, [])
  return output 0=%view_default, output 1=%view_default_1
""",
    )


def test_a_sum_that_waits_for_another_stays_alone() -> None:
    sums = Sums()
    mean = sums.wait(sums.start("mean"))
    square = sums.wait(sums.start("square"))
    gm = sums.returns({Output(0): mean, Output(1): square})
    assert after(CoalesceReductions(), gm).count("all_reduce(") == 2


def test_large_sums_travel_alone() -> None:
    sums = Sums()
    pending = sums.start("a"), sums.start("b")
    gm = sums.returns({Output(i): sums.wait(p) for i, p in enumerate(pending)})
    assert after(CoalesceReductions(limit=4), gm).count("all_reduce(") == 2
