from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from fxdp.errors import PlacementError
from fxdp.ir.graph.metadata import Location, meta
from fxdp.ir.graph.signature import Buffer as BufferSlot
from fxdp.ir.graph.signature import Gradient, Input, Mutation, Output, Parameter
from fxdp.ir.types.placements import P, R, S
from fxdp.passes.insert_collectives import InsertCollectives
from tests.graphs import Sketch, after, mesh

aten = torch.ops.aten


def test_partial_to_replicated_is_an_all_reduce() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 4]", S(0))
    total = g.call(aten.sum.dim_IntList, x, [0], type="f32[4]", at=P, reads=(S(0),))
    gm = g.returns({Gradient(Parameter("w")): total}, (R,))
    assert_expected_inline(
        after(InsertCollectives(), gm),
        """\
mesh(dp=2)
  %x: f32[B, 4] {dp=S(0)} = input(x)
  %sum_dim_int_list: f32[4] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0])
  %all_reduce: f32[4] {dp=R} = all_reduce(%sum_dim_int_list, sum)  # gradient of w
  %wait: f32[4] {dp=R} = wait(%all_reduce)
  return gradient param(w)=%wait
""",
    )


def test_partial_to_sharded_is_a_reduce_scatter() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, B, 6]", S(0))
    total = g.call(aten.sum.dim_IntList, x, [0], type="f32[B, 6]", at=P, reads=(S(0),))
    gm = g.returns({Output(0): g.call(aten.relu.default, total, type="f32[B, 6]", at=S(0), reads=(S(0),))})
    assert_expected_inline(
        after(InsertCollectives(), gm),
        """\
mesh(dp=2)
  %x: f32[B, B, 6] {dp=S(0)} = input(x)
  %sum_dim_int_list: f32[B, 6] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0])
  %reduce_scatter: f32[B, 6] {dp=S(0)} = reduce_scatter(%sum_dim_int_list, 0, 1, 1)  # aten.relu
  %wait: f32[B, 6] {dp=S(0)} = wait(%reduce_scatter)
  %relu_default: f32[B, 6] {dp=S(0)} = aten.relu(%wait)
  return output 0=%relu_default
""",
    )


def test_sharded_to_replicated_is_an_all_gather_with_its_factors() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 6]", S(0))
    y = g.call(aten.view.default, x, [-1], type="f32[B*6]", at=S(0), reads=(S(0),))
    both = g.call(aten.cat.default, [y, y], type="f32[B*12]", at=S(0, 2), reads=(S(0), S(0)))
    gm = g.returns({Output(0): g.call(aten.det.default, both, type="f32[]", at=R, reads=(R,))})
    assert_expected_inline(
        after(InsertCollectives(), gm),
        """\
mesh(dp=2)
  %x: f32[B, 6] {dp=S(0)} = input(x)
  %view_default: f32[6*B] {dp=S(0)} = aten.view(%x, [-1])
  %cat_default: f32[12*B] {dp=S(0, 2)} = aten.cat([%view_default, %view_default])
  %all_gather: f32[12*B] {dp=R} = all_gather(%cat_default, 0, 2, 6)  # aten.det
  %wait: f32[12*B] {dp=R} = wait(%all_gather)
  %det_default: f32[] {dp=R} = aten.det(%wait)
  return output 0=%det_default
""",
    )


def test_a_replicated_value_is_cut_or_masked_right_before_its_first_use() -> None:
    g = Sketch()
    x, mask = g.add(Input(0, "x"), "f32[B]", S(0)), g.add(Parameter("p"), "f32[B]", R)
    one = g.add(Parameter("one"), "f32[]", R)
    y = g.call(aten.exp.default, x, type="f32[B]", at=S(0), reads=(S(0),))
    z = g.call(aten.mul.Tensor, y, mask, type="f32[B]", at=S(0), reads=(S(0), S(0)))
    total = g.call(aten.sum.default, z, type="f32[]", at=P, reads=(S(0),))
    gm = g.returns({Output(0): g.call(aten.add.Tensor, total, one, type="f32[]", at=P, reads=(P, P))}, (R,))
    assert_expected_inline(
        after(InsertCollectives(), gm),
        """\
mesh(dp=2)
  %x: f32[B] {dp=S(0)} = input(x)
  %p: f32[B] {dp=R} = param(p)
  %one: f32[] {dp=R} = param(one)
  %exp_default: f32[B] {dp=S(0)} = aten.exp(%x)
  %shard: f32[B] {dp=S(0)} = shard(%p, 0, 1)  # aten.mul.Tensor
  %mul_tensor: f32[B] {dp=S(0)} = aten.mul.Tensor(%exp_default, %shard)
  %sum_default: f32[] {dp=P(sum)} = aten.sum(%mul_tensor)
  %partial: f32[] {dp=P(sum)} = partial(%one)  # aten.add.Tensor
  %add_tensor: f32[] {dp=P(sum)} = aten.add.Tensor(%sum_default, %partial)
  %all_reduce: f32[] {dp=R} = all_reduce(%add_tensor, sum)  # output 0
  %wait: f32[] {dp=R} = wait(%all_reduce)
  return output 0=%wait
""",
    )


def test_a_conversion_is_made_once_per_value() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    total = g.call(aten.sum.default, x, type="f32[]", at=P, reads=(S(0),))
    first = g.call(aten.exp.default, total, type="f32[]", at=R, reads=(R,))
    second = g.call(aten.div.Tensor, first, total, type="f32[]", at=R, reads=(R, R))
    gm = g.returns({Output(0): second}, (R,))
    InsertCollectives().run(gm, mesh())
    assert [n.name for n in gm.graph.nodes if n.name.startswith("all_reduce")] == ["all_reduce"]


def test_one_value_in_two_placements() -> None:
    """The outer product of a vector with itself reads it as a part and full."""
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    gm = g.returns({Output(0): g.call(aten.outer.default, x, x, type="f32[B, B]", at=S(0), reads=(S(0), R))})
    assert_expected_inline(
        after(InsertCollectives(), gm),
        """\
mesh(dp=2)
  %x: f32[B] {dp=S(0)} = input(x)
  %all_gather: f32[B] {dp=R} = all_gather(%x, 0, 1, 1)  # aten.outer
  %wait: f32[B] {dp=R} = wait(%all_gather)
  %outer_default: f32[B, B] {dp=S(0)} = aten.outer(%x, %wait)
  return output 0=%outer_default
""",
    )


def test_a_gather_of_a_placeholder_starts_after_all_placeholders() -> None:
    g = Sketch()
    x, y = g.add(Input(0, "x"), "f32[B]", S(0)), g.add(Input(1, "y"), "f32[B]", S(0))
    gm = g.returns({Output(0): g.call(aten.dot.default, x, y, type="f32[]", at=R, reads=(R, R))})
    InsertCollectives().run(gm, mesh())
    ops = [n.op for n in gm.graph.nodes]
    assert ops == sorted(ops, key=["placeholder", "call_function", "output"].index)


def test_what_depends_on_no_data_is_computed_whole_instead_of_gathered() -> None:
    g = Sketch()
    ones = g.call(aten.ones.default, [6], type="f32[B]", at=S(0))
    halves = g.call(aten.mul.Tensor, ones, 0.5, type="f32[B]", at=S(0), reads=(S(0),))
    gm = g.returns({Output(0): g.call(aten.det.default, halves, type="f32[]", at=R, reads=(R,))})
    assert_expected_inline(
        after(InsertCollectives(), gm),
        """\
mesh(dp=2)
  %ones_default: f32[B] {dp=S(0)} = aten.ones([6])
  %ones_default_1: f32[B] {dp=R} = aten.ones([6])
  %mul_tensor: f32[B] {dp=S(0)} = aten.mul.Tensor(%ones_default, 0.5)
  %mul_tensor_1: f32[B] {dp=R} = aten.mul.Tensor(%ones_default_1, 0.5)
  %det_default: f32[] {dp=R} = aten.det(%mul_tensor_1)
  return output 0=%det_default
""",
    )


def test_sharded_to_partial_goes_through_the_whole_value() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    gm = g.returns({Output(0): g.call(aten.neg.default, x, type="f32[B]", at=P, reads=(P,))})
    InsertCollectives().run(gm, mesh())
    names = [n.name for n in gm.graph.nodes]
    assert names == ["x", "all_gather", "wait", "partial", "neg_default", "output"]


def test_a_random_value_that_all_ranks_share_comes_from_rank_0() -> None:
    def graph() -> torch.fx.GraphModule:
        g = Sketch()
        noise = g.call(aten.rand.default, [4], type="f32[4]", at=R)
        return g.returns({Output(0): g.call(aten.neg.default, noise, type="f32[4]", at=R, reads=(R,))})

    assert_expected_inline(
        after(InsertCollectives(), graph()),
        """\
mesh(dp=2)
  %rand_default: f32[4] {dp=R} = aten.rand([4])
  %broadcast: f32[4] {dp=R} = broadcast(%rand_default)  # aten.rand must draw the same numbers on all ranks
  %wait: f32[4] {dp=R} = wait(%broadcast)
  %neg_default: f32[4] {dp=R} = aten.neg(%wait)
  return output 0=%neg_default
""",
    )
    assert "broadcast" not in after(InsertCollectives(single_device_rng=True), graph())


def test_one_rank_has_no_collectives() -> None:
    g = Sketch()
    noise = g.call(aten.rand.default, [4], type="f32[4]", at=R)
    gm = g.returns({Output(0): noise})
    assert "broadcast" not in after(InsertCollectives(), gm, ranks=1)


def test_causes_name_the_consumer_and_its_line() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    total = g.call(aten.sum.default, x, type="f32[]", at=P, reads=(S(0),))
    location = Location("model.py", 7, "total.exp()")
    first = g.call(aten.exp.default, total, type="f32[]", at=R, reads=(R,), location=location)
    other = g.call(aten.sum.default, x, type="f32[]", at=P, reads=(S(0),))
    third = g.call(aten.sum.default, x, type="f32[]", at=P, reads=(S(0),))
    specs = {Output(0): first, Mutation(BufferSlot("count")): other, Gradient(Input(0, "x")): third}
    gm = g.returns(specs, (R, R, R))
    InsertCollectives().run(gm, mesh())
    causes = [meta(n).cause for n in gm.graph.nodes if n.name.startswith("all_reduce")]
    assert [(c.text, c.location.line) for c in causes if c] == [
        ("aten.exp in `total.exp()`", 7),
        ("new value of count", 0),
        ("gradient of input x", 0),
    ]


def test_a_placement_that_cannot_be_is_a_bug_in_a_rule() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 4]", S(0))
    total = g.call(aten.sum.dim_IntList, x, [0], type="f32[4]", at=P, reads=(S(0),))
    gm = g.returns({Output(0): total}, (S(0),))
    with pytest.raises(PlacementError, match=r"cannot be S\(0\); this is a bug in a rule"):
        InsertCollectives().run(gm, mesh())


def test_a_gather_behind_a_deep_chain() -> None:
    g = Sketch()
    node = g.add(Input(0, "x"), "f32[B]", S(0))
    for _ in range(3000):
        node = g.call(aten.exp.default, node, type="f32[B]", at=S(0), reads=(S(0),))
    gm = g.returns({Output(0): g.call(aten.det.default, node, type="f32[]", at=R, reads=(R,))})
    InsertCollectives().run(gm, mesh())
    assert [n.name for n in gm.graph.nodes][-4:] == ["all_gather", "wait", "det_default", "output"]


def test_a_value_that_is_only_half_free_of_data_leaves_no_clones() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    ones = g.call(aten.ones_like.default, x, type="f32[B]", at=S(0), reads=(None,))
    mask = g.call(aten.ones.default, [6], type="f32[B]", at=S(0))
    y = g.call(aten.addcmul.default, mask, x, ones, type="f32[B]", at=S(0), reads=(S(0),) * 3)
    gm = g.returns({Output(0): g.call(aten.det.default, y, type="f32[]", at=R, reads=(R,))})
    InsertCollectives().run(gm, mesh())
    assert len([n for n in gm.graph.nodes if n.target is aten.ones.default]) == 1
