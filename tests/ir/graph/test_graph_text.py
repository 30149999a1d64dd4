from __future__ import annotations

import operator

import torch
from expecttest import assert_expected_inline

from fxdp.ir import redistributions
from fxdp.ir.graph.graph_text import graph_text, node_text, target_text, type_text
from fxdp.ir.graph.metadata import Cause, Location
from fxdp.ir.graph.signature import Buffer, Constant, Gradient, Input, Mutation, Output, Parameter, Tangent
from fxdp.ir.types.placements import P, R, S
from fxdp.ir.types.sizes import B
from fxdp.ir.types.value_types import ScalarType, TensorType
from tests.graphs import Sketch, text

aten = torch.ops.aten


def test_each_kind_of_slot_and_result() -> None:
    g = Sketch()
    g.size("B")
    w, count = g.add(Parameter("fc.weight"), "f32[3, 4]", R), g.add(Buffer("count"), "i64[]", R)
    g.add(Constant("table"), "b8[2]", R)
    g.add(Input(0, "x"), "f32[B, 3]", S(0))
    g.add(Input(1), "bf16[2*B]", S(0, 2))
    tangent = g.add(Tangent(0), "f32[B, 4]", S(0))
    gm = g.returns(
        {
            Output(0): tangent,
            Mutation(Buffer("count")): count,
            Gradient(Parameter("fc.weight")): w,
        }
    )
    assert_expected_inline(
        text(gm),
        """\
mesh(dp=2)
  %b: int(B) = size(B)
  %fc_weight: f32[3, 4] {dp=R} = param(fc.weight)
  %count: i64[] {dp=R} = buffer(count)
  %table: b8[2] {dp=R} = constant(table)
  %x: f32[B, 3] {dp=S(0)} = input(x)
  %input_1: bf16[2*B] {dp=S(0, 2)} = input(1)
  %tangent: f32[B, 4] {dp=S(0)} = tangent(0)
  return output 0=%tangent, new buffer(count)=%count, gradient param(fc.weight)=%fc_weight
""",
    )


def test_calls() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 4]", S(0))
    size = g.call(aten.sym_size.int, x, 0, type="int(B)")
    best = g.call(aten.max.dim, x, 1, type="(f32[B], i64[B])", at=(S(0), S(0)), reads=(S(0),))
    first = g.call(operator.getitem, best, 0, type="f32[B]", at=S(0))
    third = g.call(aten.div.Tensor, first, 1 / 3, type="f32[B]", at=S(0), reads=(S(0),))
    total = g.call(aten.sum.default, third, type="f32[]", at=P, reads=(S(0),))
    cause = Cause("output", "total", Location("/home/me/model.py", 3), "output 0")
    pending = g.call(redistributions.all_reduce, total, "sum", type="f32[]", at=R, reads=(P,), cause=cause)
    full = g.call(aten.full.default, [size, 4], 0.5, type="f32[B, 4]", at=R)
    full.kwargs = {"dtype": torch.float32, "pin_memory": None}
    gm = g.returns(
        {Output(0): g.call(redistributions.wait, pending, type="f32[]", at=R, reads=(R,)), Output(1): full}
    )
    assert_expected_inline(
        text(gm),
        """\
mesh(dp=2)
  %x: f32[B, 4] {dp=S(0)} = input(x)
  %sym_size_int: int(B) = aten.sym_size.int(%x, 0)
  %max_dim: (f32[B], i64[B]) {dp=S(0), S(0)} = aten.max.dim(%x, 1)
  %getitem: f32[B] {dp=S(0)} = getitem(%max_dim, 0)
  %div_tensor: f32[B] {dp=S(0)} = aten.div.Tensor(%getitem, 0.333333)
  %sum_default: f32[] {dp=P(sum)} = aten.sum(%div_tensor)
  %all_reduce: f32[] {dp=R} = all_reduce(%sum_default, sum)  # output 0
  %full_default: f32[B, 4] {dp=R} = aten.full([%sym_size_int, 4], 0.5, dtype=f32, pin_memory=None)
  %wait: f32[] {dp=R} = wait(%all_reduce)
  return output 0=%wait, output 1=%full_default
""",
    )
    assert "#" not in graph_text(gm, {"dp": 2}, causes=False)
    assert "0.3333333333333333" in graph_text(gm, exact=True)
    assert "/home/me" not in text(gm)


def test_every_axis_shows_the_placement() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    lines = graph_text(g.returns({Output(0): x}), {"dp_replicate": 2, "dp": 4}).splitlines()
    assert lines[0] == "mesh(dp_replicate=2, dp=4)"
    assert lines[1] == "  %x: f32[B] {dp_replicate=S(0) dp=S(0)} = input(x)"


def test_what_is_not_placed_has_no_brace() -> None:
    g = Sketch()
    assert node_text(g.add(Input(0, "x"), "f32[B]"), ("dp",)) == "%x: f32[B] = input(x)"


def test_types() -> None:
    tensor = TensorType(torch.float64, (2 * B, 3))
    assert type_text(tensor) == "f64[2*B, 3]"
    assert type_text((tensor, None, ScalarType(B + 1))) == "(f64[2*B, 3], none, int(B + 1))"
    assert type_text(TensorType(torch.float8_e4m3fn, ())) == "float8_e4m3fn[]"


def test_targets() -> None:
    assert target_text(aten.mm.default) == "aten.mm"
    assert target_text(aten.sum.dim_IntList) == "aten.sum.dim_IntList"
    assert target_text(redistributions.all_gather) == "all_gather"


def test_equal_programs_have_equal_text() -> None:
    def build() -> str:
        g = Sketch()
        x = g.add(Input(0, "x"), "f32[B]", S(0))
        return text(g.returns({Output(0): g.call(aten.mul.Tensor, x, x, type="f32[B]", at=S(0))}))

    assert build() == build()
