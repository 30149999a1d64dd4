from __future__ import annotations

import operator

import pytest
import torch
from expecttest import assert_expected_inline

from fxdp.compiler.verifier import verify
from fxdp.ir import redistributions
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import Cause, Location, meta
from fxdp.ir.graph.signature import Input, Output
from fxdp.ir.types.placements import P, R, S
from fxdp.passes.emit_program import EmitProgram
from tests.graphs import Sketch, after

aten = torch.ops.aten
CAUSE = Cause("a", "b", Location())
SIZES = (("B", 7), ("b", 3), ("offset", 0), ("b_max", 4))


def _gather() -> torch.fx.GraphModule:
    g = Sketch()
    g.size("B"), g.size("b"), g.size("offset")
    x = g.add(Input(0, "x"), "f32[B*6]", S(0))
    pending = g.call(
        redistributions.all_gather, x, 0, 1, 6, type="f32[B*6]", at=R, reads=(S(0),), cause=CAUSE
    )
    return g.returns(
        {Output(0): g.call(redistributions.wait, pending, type="f32[B*6]", at=R, reads=(R,))}, (R,)
    )


def _scatter() -> torch.fx.GraphModule:
    g = Sketch()
    g.size("B"), g.size("b"), g.size("offset")
    x = g.add(Input(0, "x"), "f32[B]", P)
    pending = g.call(
        redistributions.reduce_scatter, x, 0, 1, 1, type="f32[B]", at=S(0), reads=(P,), cause=CAUSE
    )
    return g.returns(
        {Output(0): g.call(redistributions.wait, pending, type="f32[B]", at=S(0), reads=(S(0),))}, (S(0),)
    )


def test_an_even_gather_needs_no_padding() -> None:
    assert_expected_inline(
        after(EmitProgram(even=True), _gather()),
        """\
mesh(dp=2)
  %b: int(B) = size(B)
  %b_1: int(b) = size(b)
  %offset: int(offset) = size(offset)
  %x: f32[6*B] {dp=S(0)} = input(x)
  %start_all_gather: f32[6*B] {dp=R} = start_all_gather(%x, 0, 1, 6, 2, None, )
  %finish_all_gather: f32[6*B] {dp=R} = finish_all_gather(%start_all_gather, 0, None)
  return output 0=%finish_all_gather
""",
    )


def test_an_uneven_gather_pads_to_the_largest_part() -> None:
    assert_expected_inline(
        after(EmitProgram(even=False), _gather()),
        """\
mesh(dp=2)
  %rows: i64[B] {dp=R} = constant(<rows>)
  %b_max: int(b_max) = size(b_max)
  %b: int(B) = size(B)
  %b_1: int(b) = size(b)
  %offset: int(offset) = size(offset)
  %x: f32[6*B] {dp=S(0)} = input(x)
  %start_all_gather: f32[6*B] {dp=R} = start_all_gather(%x, 0, 1, 6, 2, %b_max, )
  %finish_all_gather: f32[6*B] {dp=R} = finish_all_gather(%start_all_gather, 0, %rows)
  return output 0=%finish_all_gather
""",
    )


def test_an_uneven_reduce_scatter() -> None:
    assert_expected_inline(
        after(EmitProgram(even=False), _scatter()),
        """\
mesh(dp=2)
  %rows: i64[B] {dp=R} = constant(<rows>)
  %b_max: int(b_max) = size(b_max)
  %b: int(B) = size(B)
  %b_1: int(b) = size(b)
  %offset: int(offset) = size(offset)
  %x: f32[B] {dp=P(sum)} = input(x)
  %start_reduce_scatter: f32[B] {dp=S(0)} = start_reduce_scatter(%x, 0, 1, 1, 2, %b_max, %rows, )
  %finish_reduce_scatter: f32[B] {dp=S(0)} = finish_reduce_scatter(%start_reduce_scatter, 0, %b_1)
  return output 0=%finish_reduce_scatter
""",
    )


@pytest.mark.parametrize("graph", [_gather, _scatter])
@pytest.mark.parametrize("sizes", [None, SIZES])
@pytest.mark.parametrize("even", [True, False])
def test_what_emission_adds_has_a_type(graph, sizes, even) -> None:  # type: ignore[no-untyped-def]
    gm = graph()
    after(EmitProgram(sizes, even), gm)
    verify(gm, Level.EMITTED, "emit-program")


def test_known_sizes_become_numbers() -> None:
    g = Sketch()
    total, own, _ = g.size("B"), g.size("b"), g.size("offset")
    x = g.add(Input(0, "x"), "f32[B, 2]", S(0))
    double = g.call(operator.mul, own, 2, type="int(B*2)")
    flat = g.call(aten.reshape.default, x, [double], type="f32[B*2]", at=S(0), reads=(S(0),))
    mean = g.call(aten.div.Tensor, flat, total, type="f32[B*2]", at=S(0), reads=(S(0),))
    gm = g.returns({Output(0): mean}, (S(0),))
    assert_expected_inline(
        after(EmitProgram(SIZES), gm),
        """\
mesh(dp=2)
  %x: f32[B, 2] {dp=S(0)} = input(x)
  %reshape_default: f32[2*B] {dp=S(0)} = aten.reshape(%x, [6])
  %div_tensor: f32[2*B] {dp=S(0)} = aten.div.Tensor(%reshape_default, 7)
  return output 0=%div_tensor
""",
    )


def test_shard_and_partial() -> None:
    g = Sketch()
    g.size("B"), g.size("b"), g.size("offset")
    x = g.add(Input(0, "x"), "f32[B]", R)
    part = g.call(redistributions.shard, x, 0, 1, type="f32[B]", at=S(0), reads=(R,))
    term = g.call(redistributions.partial, x, type="f32[B]", at=P, reads=(R,))
    gm = g.returns({Output(0): part, Output(1): term}, (S(0), P))
    assert_expected_inline(
        after(EmitProgram(SIZES), gm),
        """\
mesh(dp=2)
  %x: f32[B] {dp=R} = input(x)
  %shard: f32[B] {dp=S(0)} = shard(%x, 0, 1, 7, 0, 3)
  %partial: f32[B] {dp=P(sum)} = partial(%x, 0)
  return output 0=%shard, output 1=%partial
""",
    )


def test_a_constant_of_the_model_called_rows_is_no_row_list() -> None:
    from fxdp.ir.graph.signature import Constant

    gm = _gather()
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_before(first):
        mine = gm.graph.placeholder("rows")
    meta(mine).spec = Constant("rows")
    after(EmitProgram(SIZES, even=False), gm)
    finish = next(n for n in gm.graph.nodes if n.name == "finish_all_gather")
    assert finish.args[2] is not mine
