from __future__ import annotations

import operator

import torch
from expecttest import assert_expected_inline

import fxdp.rules  # noqa: F401 - registers the rules
from fxdp.compiler.verifier import verify
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.signature import Input, Output
from fxdp.passes.batch_dim_analyzer import BatchDimAnalyzer
from fxdp.passes.expand_decompositions import ExpandDecompositions
from fxdp.passes.insert_collectives import InsertCollectives
from tests.graphs import Sketch, after, mesh

aten = torch.ops.aten


def sketch() -> tuple[Sketch, torch.fx.Node]:
    g = Sketch()
    return g, g.add(Input(0, "x"), "f32[4, B]")


def test_a_softmax_of_parts_is_spelled_out() -> None:
    g, x = sketch()
    y = g.call(aten._softmax.default, x, 1, False, type="f32[4, B]")
    gm = BatchDimAnalyzer((1,)).run(g.returns({Output(0): y}), mesh())
    assert_expected_inline(
        after(ExpandDecompositions(), gm),
        """\
mesh(dp=2)
  %x: f32[4, B] {dp=S(1)} = input(x)
  %amax_default: f32[4, 1] {dp=P(max)} = fxdp.amax(%x, [1], True)
  %sub_tensor: f32[4, B] {dp=S(1)} = aten.sub.Tensor(%x, %amax_default)
  %exp_default: f32[4, B] {dp=S(1)} = aten.exp(%sub_tensor)
  %sum_dim_int_list: f32[4, 1] {dp=P(sum)} = aten.sum.dim_IntList(%exp_default, [1], True)
  %_softmax_default: f32[4, B] {dp=S(1)} = aten.div.Tensor(%exp_default, %sum_dim_int_list)
  return output 0=%_softmax_default
""",
    )
    verify(gm, Level.PLACED, "expand-decompositions")


def test_results_that_nobody_picks_are_not_made() -> None:
    g, x = sketch()
    both = g.call(aten.max.dim, x, 1, type="(f32[4], i64[4])")
    values = g.call(operator.getitem, both, 0, type="f32[4]")
    gm = BatchDimAnalyzer((1,)).run(g.returns({Output(0): values}), mesh())
    assert_expected_inline(
        after(ExpandDecompositions(), gm),
        """\
mesh(dp=2)
  %x: f32[4, B] {dp=S(1)} = input(x)
  %amax_default: f32[4, 1] {dp=P(max)} = fxdp.amax(%x, [1], True)
  %getitem: f32[4] {dp=R} = aten.view(%amax_default, [4])
  return output 0=%getitem
""",
    )


def test_both_results_share_the_extremum() -> None:
    g, x = sketch()
    both = g.call(aten.max.dim, x, 1, type="(f32[4], i64[4])")
    values = g.call(operator.getitem, both, 0, type="f32[4]")
    positions = g.call(operator.getitem, both, 1, type="i64[4]")
    gm = BatchDimAnalyzer((1,)).run(g.returns({Output(0): values, Output(1): positions}), mesh())
    gm = InsertCollectives().run(ExpandDecompositions().run(gm, mesh()), mesh())
    verify(gm, Level.EXPLICIT, "insert-collectives")
    names = [n.name for n in gm.graph.nodes]
    assert sum(name.startswith("all_reduce") for name in names) == 2
    assert {"getitem", "getitem_1"} <= set(names)
    assert "max_dim" not in names


def test_the_cause_of_a_reduction_is_the_op_that_was_written() -> None:
    g, x = sketch()
    y = g.call(aten._log_softmax.default, x, 1, False, type="f32[4, B]")
    gm = BatchDimAnalyzer((1,)).run(g.returns({Output(0): y}), mesh())
    gm = InsertCollectives().run(ExpandDecompositions().run(gm, mesh()), mesh())
    causes = [n.meta["fxdp"].cause.text for n in gm.graph.nodes if n.name.startswith("all_reduce")]
    assert causes == ["aten._log_softmax"] * 2


def test_a_whole_dim_needs_no_recipe() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 4]")
    y = g.call(aten._softmax.default, x, 1, False, type="f32[B, 4]")
    gm = BatchDimAnalyzer((0,)).run(g.returns({Output(0): y}), mesh())
    before = after(ExpandDecompositions(), gm)
    assert "aten._softmax(%x, 1, False)" in before
