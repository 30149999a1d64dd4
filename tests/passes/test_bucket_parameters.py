from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.graph_text import graph_text
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Gradient, Input, Output, Parameter, Tangent
from fxdp.ir.network.link_cost import LinkCost
from fxdp.ir.types.mesh import mesh_of
from fxdp.ir.types.placements import P, ParamShard, R, S
from fxdp.passes.bucket_gradients import BucketGradients
from fxdp.passes.bucket_parameters import BucketParameters
from fxdp.passes.insert_collectives import InsertCollectives
from fxdp.passes.schedule_prefetch import SchedulePrefetch
from tests.graphs import Sketch, after, mesh

aten = torch.ops.aten


def two_layers(*, unsharded_once: bool = False) -> fx.GraphModule:
    """`y = (x * a) * b` with its backward, at EXPLICIT; `a` and `b` have 5 rows each."""
    g = Sketch()
    b, a = g.add(Parameter("b"), "f32[5]", ParamShard()), g.add(Parameter("a"), "f32[5]", ParamShard())
    x, tangent = g.add(Input(0, "x"), "f32[B, 5]", S(0)), g.add(Tangent(0), "f32[B, 5]", S(0))
    sides, back = (S(0), R), {"backward": True}
    h = g.call(aten.mul.Tensor, x, a, type="f32[B, 5]", at=S(0), reads=sides, name="h")
    y = g.call(aten.mul.Tensor, h, b, type="f32[B, 5]", at=S(0), reads=sides, name="y")
    gb = g.call(aten.mul.Tensor, tangent, h, type="f32[B, 5]", at=S(0), reads=(S(0), S(0)), name="gb", **back)
    db = g.call(aten.sum.dim_IntList, gb, [0], type="f32[5]", at=P, reads=(S(0),), name="db", **back)
    gh = g.call(aten.mul.Tensor, tangent, b, type="f32[B, 5]", at=S(0), reads=sides, name="gh", **back)
    ga = g.call(aten.mul.Tensor, gh, x, type="f32[B, 5]", at=S(0), reads=(S(0), S(0)), name="ga", **back)
    da = g.call(aten.sum.dim_IntList, ga, [0], type="f32[5]", at=P, reads=(S(0),), name="da", **back)
    results = {Output(0): y, Gradient(Parameter("b")): db, Gradient(Parameter("a")): da}
    gm = g.returns(results, (S(0), ParamShard(), ParamShard()))
    return InsertCollectives(unsharded_once=unsharded_once).run(gm, mesh())


def test_what_is_used_in_one_phase_travels_together() -> None:
    assert_expected_inline(
        after(BucketParameters(), two_layers()),
        """\
mesh(dp=2)
  %b: f32[5] {dp=ParamShard} = param(b)
  %a: f32[5] {dp=ParamShard} = param(a)
  %x: f32[B, 5] {dp=S(0)} = input(x)
  %tangent: f32[B, 5] {dp=S(0)} = tangent(0)
  %all_gather_shards_3: f32[12] {dp=R} = all_gather_shards([%b, %a], [3, 3], [])  # a and 1 more for aten.mul.Tensor
  %wait_5: f32[12] {dp=R} = wait(%all_gather_shards_3)
  %slice_tensor: f32[5] {dp=R} = aten.slice.Tensor(%wait_5, 0, 0, 5)
  %view_default: f32[5] {dp=R} = aten.view(%slice_tensor, [5])
  %slice_tensor_1: f32[5] {dp=R} = aten.slice.Tensor(%wait_5, 0, 6, 11)
  %view_default_1: f32[5] {dp=R} = aten.view(%slice_tensor_1, [5])
  %h: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%x, %view_default_1)
  %y: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%h, %view_default)
  %gb: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%tangent, %h)
  %db: f32[5] {dp=P(sum)} = aten.sum.dim_IntList(%gb, [0])
  %all_gather_shards_4: f32[6] {dp=R} = all_gather_shards([%b], [3], [])  # b for aten.mul.Tensor
  %wait_6: f32[6] {dp=R} = wait(%all_gather_shards_4)
  %slice_tensor_2: f32[5] {dp=R} = aten.slice.Tensor(%wait_6, 0, 0, 5)
  %view_default_2: f32[5] {dp=R} = aten.view(%slice_tensor_2, [5])
  %gh: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%tangent, %view_default_2)
  %ga: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%gh, %x)
  %da: f32[5] {dp=P(sum)} = aten.sum.dim_IntList(%ga, [0])
  %reduce_scatter_shards_2: f32[12] {dp=ParamShard} = reduce_scatter_shards([%db, %da], [3, 3], [])  # 2 gradients: gradient of b to a
  %wait_7: f32[12] {dp=ParamShard} = wait(%reduce_scatter_shards_2)
  %slice_tensor_3: f32[5] {dp=ParamShard} = aten.slice.Tensor(%wait_7, 0, 0, 3)
  %view_default_3: f32[5] {dp=ParamShard} = aten.view(%slice_tensor_3, [3])
  %slice_tensor_4: f32[5] {dp=ParamShard} = aten.slice.Tensor(%wait_7, 0, 3, 6)
  %view_default_4: f32[5] {dp=ParamShard} = aten.view(%slice_tensor_4, [3])
  return output 0=%y, gradient param(b)=%view_default_3, gradient param(a)=%view_default_4
""",  # noqa: E501
    )


def test_a_bucket_has_room_for_so_many_bytes() -> None:
    gm = BucketParameters(bucket_bytes=20).run(two_layers(), mesh())
    starts = [n for n in gm.graph.nodes if n.target in redistributions.ORDERED]
    assert [len(n.args[0]) for n in starts] == [1, 1, 1, 1, 1]  # a, b forward; b backward; two gradients


def _chain(order: str) -> fx.GraphModule:
    """`x` times parameters of 20 bytes, by their letters; `+` adds the two that follow in one op."""
    g, made = Sketch(), dict[str, fx.Node]()
    for name in sorted(set(order) - {"+"}):
        made[name] = g.add(Parameter(name), "f32[5]", ParamShard())
    x = g.add(Input(0, "x"), "f32[B, 5]", S(0))
    for each in re.findall(r"\+..|.", order):
        op = aten.addcmul.default if len(each) > 1 else aten.mul.Tensor
        read = [made[name] for name in each.removeprefix("+")]
        x = g.call(op, x, *read, type="f32[B, 5]", at=S(0), reads=(S(0), *[R] * len(read)))
    return InsertCollectives().run(g.returns({Output(0): x}), mesh())


@pytest.mark.parametrize(
    ("order", "room", "buckets"),
    [
        ("wabcw", 40, "ab c w"),  # read first and last: nothing stays with it
        ("wabvcwdv", 40, "vw a b c d"),  # two beside it are 80 bytes with it
        ("wabvcwdv", 35, "v w ab cd"),  # it has more than 35 itself
        ("uvwabcduvw", 50, "uv w ab cd"),
        ("wab", 40, "aw b"),
        ("wwab", 40, "aw b"),  # done with when the next is due
        ("a+bc", 40, "a bc"),  # what one op reads is not taken apart
        ("abcde", 30, "ab cd e"),  # few, though of more bytes than asked for
    ],
)
def test_buckets_by_lifetime(order: str, room: int, buckets: str) -> None:
    gm = BucketParameters(bucket_bytes=room).run(_chain(order), mesh())
    starts = gm.graph.find_nodes(op="call_function", target=redistributions.all_gather_shards)
    found = ["".join(n.name for n in start.args[0]) for start in starts]
    assert sorted(found) == sorted(buckets.split())


def test_along_one_of_two_axes_a_bucket_is_summed_once() -> None:
    both = mesh_of({"dp_replicate": 2, "dp_shard": 2}, "cpu")
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 5]", S(0))
    da, db = (
        g.call(aten.sum.dim_IntList, x, [0], type="f32[5]", at=P, reads=(S(0),), name=name, backward=True)
        for name in ("da", "db")
    )
    gradients = {Gradient(Parameter("a")): da, Gradient(Parameter("b")): db}
    gm = InsertCollectives().run(g.returns(gradients, (ParamShard("dp_shard"),) * 2), both)
    gm = BucketParameters().run(gm, both)
    targets = [n.target for n in gm.graph.nodes if n.target in redistributions.COLLECTIVES]
    assert targets == [redistributions.reduce_scatter_shards, redistributions.all_reduce_shards]


def test_gradients_stand_as_their_parameters_lie_in_memory() -> None:
    """Whatever is made first: so an optimizer may step all of a bucket as one tensor."""
    g = Sketch()
    for name in "abc":
        g.add(Parameter(name), "f32[5]", ParamShard())
    x, made = g.add(Input(0, "x"), "f32[B, 5]", S(0)), {}
    for name in "cab":
        made[name] = g.call(
            aten.sum.dim_IntList, x, [0], type="f32[5]", at=P, reads=(S(0),), name=f"d{name}", backward=True
        )
    gradients = {Gradient(Parameter(name)): node for name, node in made.items()}
    gm = BucketParameters().run(
        InsertCollectives().run(g.returns(gradients, (ParamShard(),) * 3), mesh()), mesh()
    )
    (scatter,) = gm.graph.find_nodes(op="call_function", target=redistributions.reduce_scatter_shards)
    assert [n.name for n in scatter.args[0]] == ["da", "db", "dc"]


def test_what_stays_for_the_backward_has_a_bucket_of_its_own() -> None:
    """A flat value lives as long as any that is cut out of it."""
    gm = BucketParameters(kept=frozenset({"a"})).run(two_layers(unsharded_once=True), mesh())
    gathers = gm.graph.find_nodes(op="call_function", target=redistributions.all_gather_shards)
    assert [[n.name for n in gather.args[0]] for gather in gathers] == [["a"], ["b"]]


def test_over_a_network_rows_travel_as_they_do_elsewhere() -> None:
    """What gathers and scatters come after is no wait: sums of gradients are planned around none of them."""
    slow = replace(mesh(), link=LinkCost(1e-6, 1.0))
    gm = SchedulePrefetch().run(BucketParameters(bucket_bytes=20).run(two_layers(), slow), slow)
    starts = gm.graph.find_nodes(op="call_function", target=redistributions.all_gather_shards)
    starts += gm.graph.find_nodes(op="call_function", target=redistributions.reduce_scatter_shards)
    assert any(meta(start).backward and len(start.users) > 1 for start in starts)
    before = graph_text(gm)
    assert graph_text(BucketGradients().run(gm, slow)) == before
