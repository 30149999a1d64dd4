from __future__ import annotations

import operator

import torch
from expecttest import assert_expected_inline

import fxdp.rules  # noqa: F401 - registers the rules
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Buffer, Gradient, Input, Mutation, Output, Parameter, Tangent
from fxdp.ir.ops.full_batch_draws import twin
from fxdp.ir.types.placements import R, S
from fxdp.passes.batch_dim_analyzer import BatchDimAnalyzer
from tests.graphs import Sketch, after, mesh

aten = torch.ops.aten


def test_the_gradient_of_a_weight_is_partial() -> None:
    g = Sketch()
    w, x = g.add(Parameter("w"), "f32[3, 4]"), g.add(Input(0, "x"), "f32[B, 3]")
    tangent = g.add(Tangent(0), "f32[B, 4]")
    y = g.call(aten.mm.default, x, w, type="f32[B, 4]")
    xt = g.call(aten.t.default, x, type="f32[3, B]")
    grad = g.call(aten.mm.default, xt, tangent, type="f32[3, 4]")
    gm = g.returns({Output(0): y, Gradient(Parameter("w")): grad})
    assert_expected_inline(
        after(BatchDimAnalyzer((0,)), gm),
        """\
mesh(dp=2)
  %w: f32[3, 4] {dp=R} = param(w)
  %x: f32[B, 3] {dp=S(0)} = input(x)
  %tangent: f32[B, 4] {dp=S(0)} = tangent(0)
  %mm_default: f32[B, 4] {dp=S(0)} = aten.mm(%x, %w)
  %t_default: f32[3, B] {dp=S(1)} = aten.t(%x)
  %mm_default_1: f32[3, 4] {dp=P(sum)} = aten.mm(%t_default, %tangent)
  return output 0=%mm_default, gradient param(w)=%mm_default_1
""",
    )
    assert meta(gm.graph.output_node()).operands == (S(0), R)


def test_one_rank_replicates_everything() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 3]")
    gm = g.returns({Output(0): g.call(aten.relu.default, x, type="f32[B, 3]")})
    assert_expected_inline(
        after(BatchDimAnalyzer((0,)), gm, ranks=1),
        """\
mesh(dp=2)
  %x: f32[B, 3] {dp=R} = input(x)
  %relu_default: f32[B, 3] {dp=R} = aten.relu(%x)
  return output 0=%relu_default
""",
    )


def test_an_input_without_a_batch_dim_is_replicated() -> None:
    g = Sketch()
    x, mask = g.add(Input(0, "x"), "f32[B, 3]"), g.add(Input(1, "mask"), "f32[3]")
    gm = g.returns({Output(0): g.call(aten.mul.Tensor, x, mask, type="f32[B, 3]")})
    assert_expected_inline(
        after(BatchDimAnalyzer((0, None)), gm),
        """\
mesh(dp=2)
  %x: f32[B, 3] {dp=S(0)} = input(x)
  %mask: f32[3] {dp=R} = input(mask)
  %mul_tensor: f32[B, 3] {dp=S(0)} = aten.mul.Tensor(%x, %mask)
  return output 0=%mul_tensor
""",
    )


def test_an_equal_number_is_no_batch() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 8]")
    total = g.call(aten.sum.dim_IntList, x, [1], type="f32[B]")
    weights = g.call(aten.sum.dim_IntList, x, [0], type="f32[8]")
    gm = g.returns({Output(0): total, Output(1): weights})
    assert_expected_inline(
        after(BatchDimAnalyzer((0,)), gm),
        """\
mesh(dp=2)
  %x: f32[B, 8] {dp=S(0)} = input(x)
  %sum_dim_int_list: f32[B] {dp=S(0)} = aten.sum.dim_IntList(%x, [1])
  %sum_dim_int_list_1: f32[8] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0])
  return output 0=%sum_dim_int_list, output 1=%sum_dim_int_list_1
""",
    )


def test_an_op_without_a_rule_runs_replicated() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, B]")
    det = g.call(aten._linalg_det.default, x, type="(f32[], f32[B, B], i64[B])")
    first = g.call(operator.getitem, det, 0, type="f32[]")
    gm = g.returns({Output(0): first})
    BatchDimAnalyzer((0,)).run(gm, mesh())
    assert meta(det).operands == (R,)
    assert meta(det).reason is not None


def test_random_values_shard_also_where_one_device_draws() -> None:
    """Then by the op that draws the global batch's numbers and keeps the rank's."""

    def graph() -> tuple[Sketch, object]:
        g = Sketch()
        x = g.add(Input(0, "x"), "f32[B, 3]")
        noise = g.call(aten.rand_like.default, x, type="f32[B, 3]")
        y = g.call(aten.mul.Tensor, x, noise, type="f32[B, 3]")
        return g, g.returns({Output(0): y})

    for single in (False, True):
        g, gm = graph()
        BatchDimAnalyzer((0,), single).run(gm, mesh())  # type: ignore[arg-type]
        noise = next(n for n in g.graph.nodes if n.target is aten.rand_like.default)
        assert meta(noise).placement == S(0)
        target = meta(noise).rewrite.target if meta(noise).rewrite else None
        assert target == (twin(aten.rand_like.default) if single else None)


def test_a_new_buffer_is_wanted_whole() -> None:
    g = Sketch()
    buffer, x = g.add(Buffer("count"), "f32[]"), g.add(Input(0, "x"), "f32[B]")
    total = g.call(aten.sum.dim_IntList, x, [0], type="f32[]")
    new = g.call(aten.add.Tensor, buffer, total, type="f32[]")
    gm = g.returns({Mutation(Buffer("count")): new})
    BatchDimAnalyzer((0,)).run(gm, mesh())
    assert meta(gm.graph.output_node()).operands == (R,)


def test_reduce_once_where_a_chain_begins() -> None:
    """Two views of one sum are reduced where the sum is made."""
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 4]")
    total = g.call(aten.sum.dim_IntList, x, [0], type="f32[4]")
    first = g.call(aten.exp.default, g.call(aten.neg.default, total, type="f32[4]"), type="f32[4]")
    view = g.call(aten.view.default, total, [2, 2], type="f32[2, 2]")
    second = g.call(aten.exp.default, view, type="f32[2, 2]")
    gm = g.returns({Output(0): first, Output(1): second})
    assert_expected_inline(
        after(BatchDimAnalyzer((0,)), gm),
        """\
mesh(dp=2)
  %x: f32[B, 4] {dp=S(0)} = input(x)
  %sum_dim_int_list: f32[4] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0])
  %neg_default: f32[4] {dp=R} = aten.neg(%sum_dim_int_list)
  %exp_default: f32[4] {dp=R} = aten.exp(%neg_default)
  %view_default: f32[2, 2] {dp=R} = aten.view(%sum_dim_int_list, [2, 2])
  %exp_default_1: f32[2, 2] {dp=R} = aten.exp(%view_default)
  return output 0=%exp_default, output 1=%exp_default_1
""",
    )


def test_a_second_run_gives_the_same() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 4]")
    total = g.call(aten.sum.dim_IntList, x, [0], type="f32[4]")
    gm = g.returns({Output(0): g.call(aten.exp.default, total, type="f32[4]")})
    once = after(BatchDimAnalyzer((0,)), gm)
    assert after(BatchDimAnalyzer((0,)), gm) == once
