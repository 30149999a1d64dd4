from __future__ import annotations

from itertools import pairwise

from expecttest import assert_expected_inline
from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import meta
from fxdp.passes.bucket_parameters import BucketParameters
from fxdp.passes.schedule_prefetch import SchedulePrefetch
from tests.graphs import after, mesh
from tests.passes.test_bucket_parameters import two_layers


def _bucketed(room: int) -> fx.GraphModule:
    return BucketParameters(bucket_bytes=room).run(two_layers(), mesh())


def test_a_bucket_starts_before_the_one_before_it_is_used() -> None:
    assert_expected_inline(
        after(SchedulePrefetch(), _bucketed(20)),
        """\
mesh(dp=2)
  %b: f32[5] {dp=ParamShard} = param(b)
  %a: f32[5] {dp=ParamShard} = param(a)
  %x: f32[B, 5] {dp=S(0)} = input(x)
  %tangent: f32[B, 5] {dp=S(0)} = tangent(0)
  %all_gather_shards_3: f32[6] {dp=R} = all_gather_shards([%a], [3], [])  # a for aten.mul.Tensor
  %wait_5: f32[6] {dp=R} = wait(%all_gather_shards_3)
  %slice_tensor: f32[5] {dp=R} = aten.slice.Tensor(%wait_5, 0, 0, 5)
  %view_default: f32[5] {dp=R} = aten.view(%slice_tensor, [5])
  %all_gather_shards_4: f32[6] {dp=R} = all_gather_shards([%b], [3], [%x, %all_gather_shards_3])  # b for aten.mul.Tensor
  %h: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%x, %view_default)
  %wait_6: f32[6] {dp=R} = wait(%all_gather_shards_4)
  %slice_tensor_1: f32[5] {dp=R} = aten.slice.Tensor(%wait_6, 0, 0, 5)
  %view_default_1: f32[5] {dp=R} = aten.view(%slice_tensor_1, [5])
  %y: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%h, %view_default_1)
  %gb: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%tangent, %h)
  %db: f32[5] {dp=P(sum)} = aten.sum.dim_IntList(%gb, [0])
  %reduce_scatter_shards_2: f32[6] {dp=ParamShard} = reduce_scatter_shards([%db], [3], [])  # gradient of b
  %all_gather_shards_5: f32[6] {dp=R} = all_gather_shards([%b], [3], [%tangent, %reduce_scatter_shards_2])  # b for aten.mul.Tensor
  %wait_7: f32[6] {dp=R} = wait(%all_gather_shards_5)
  %slice_tensor_2: f32[5] {dp=R} = aten.slice.Tensor(%wait_7, 0, 0, 5)
  %view_default_2: f32[5] {dp=R} = aten.view(%slice_tensor_2, [5])
  %gh: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%tangent, %view_default_2)
  %ga: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%gh, %x)
  %da: f32[5] {dp=P(sum)} = aten.sum.dim_IntList(%ga, [0])
  %reduce_scatter_shards_3: f32[6] {dp=ParamShard} = reduce_scatter_shards([%da], [3], [%all_gather_shards_5])  # gradient of a
  %wait_8: f32[6] {dp=ParamShard} = wait(%reduce_scatter_shards_2)
  %wait_9: f32[6] {dp=ParamShard} = wait(%reduce_scatter_shards_3)
  %slice_tensor_3: f32[5] {dp=ParamShard} = aten.slice.Tensor(%wait_8, 0, 0, 3)
  %view_default_3: f32[5] {dp=ParamShard} = aten.view(%slice_tensor_3, [3])
  %slice_tensor_4: f32[5] {dp=ParamShard} = aten.slice.Tensor(%wait_9, 0, 0, 3)
  %view_default_4: f32[5] {dp=ParamShard} = aten.view(%slice_tensor_4, [3])
  return output 0=%y, gradient param(b)=%view_default_3, gradient param(a)=%view_default_4
""",  # noqa: E501
    )


def test_all_starts_of_a_phase_stand_in_one_order() -> None:
    gm = SchedulePrefetch().run(_bucketed(20), mesh())
    for backward in (False, True):
        ordered = [n for n in gm.graph.nodes if n.target in redistributions.ORDERED]
        starts = [n for n in ordered if meta(n).backward is backward]
        assert len(starts) > 1
        for before, start in pairwise(starts):
            assert before in start.args[2]


def test_the_backwards_first_gather_reads_what_a_tangent_made() -> None:
    gm = SchedulePrefetch().run(_bucketed(1000), mesh())
    gathers = gm.graph.find_nodes(op="call_function", target=redistributions.all_gather_shards)
    (backward,) = [n for n in gathers if meta(n).backward]
    assert [n.name for n in backward.args[2]] == ["tangent"]


def test_gathers_come_first_where_whole_values_stay() -> None:
    gm = BucketParameters(bucket_bytes=20).run(two_layers(unsharded_once=True), mesh())
    assert_expected_inline(
        after(SchedulePrefetch(first=True), gm),
        """\
mesh(dp=2)
  %b: f32[5] {dp=ParamShard} = param(b)
  %a: f32[5] {dp=ParamShard} = param(a)
  %x: f32[B, 5] {dp=S(0)} = input(x)
  %tangent: f32[B, 5] {dp=S(0)} = tangent(0)
  %all_gather_shards_2: f32[6] {dp=R} = all_gather_shards([%a], [3], [])  # a for aten.mul.Tensor
  %all_gather_shards_3: f32[6] {dp=R} = all_gather_shards([%b], [3], [%all_gather_shards_2])  # b for aten.mul.Tensor
  %wait_4: f32[6] {dp=R} = wait(%all_gather_shards_2)
  %slice_tensor: f32[5] {dp=R} = aten.slice.Tensor(%wait_4, 0, 0, 5)
  %view_default: f32[5] {dp=R} = aten.view(%slice_tensor, [5])
  %wait_5: f32[6] {dp=R} = wait(%all_gather_shards_3)
  %slice_tensor_1: f32[5] {dp=R} = aten.slice.Tensor(%wait_5, 0, 0, 5)
  %view_default_1: f32[5] {dp=R} = aten.view(%slice_tensor_1, [5])
  %h: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%x, %view_default)
  %y: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%h, %view_default_1)
  %gb: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%tangent, %h)
  %db: f32[5] {dp=P(sum)} = aten.sum.dim_IntList(%gb, [0])
  %reduce_scatter_shards_2: f32[6] {dp=ParamShard} = reduce_scatter_shards([%db], [3], [])  # gradient of b
  %gh: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%tangent, %view_default_1)
  %ga: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%gh, %x)
  %da: f32[5] {dp=P(sum)} = aten.sum.dim_IntList(%ga, [0])
  %reduce_scatter_shards_3: f32[6] {dp=ParamShard} = reduce_scatter_shards([%da], [3], [%reduce_scatter_shards_2])  # gradient of a
  %wait_6: f32[6] {dp=ParamShard} = wait(%reduce_scatter_shards_2)
  %wait_7: f32[6] {dp=ParamShard} = wait(%reduce_scatter_shards_3)
  %slice_tensor_2: f32[5] {dp=ParamShard} = aten.slice.Tensor(%wait_6, 0, 0, 3)
  %view_default_2: f32[5] {dp=ParamShard} = aten.view(%slice_tensor_2, [3])
  %slice_tensor_3: f32[5] {dp=ParamShard} = aten.slice.Tensor(%wait_7, 0, 0, 3)
  %view_default_3: f32[5] {dp=ParamShard} = aten.view(%slice_tensor_3, [3])
  return output 0=%y, gradient param(b)=%view_default_2, gradient param(a)=%view_default_3
""",  # noqa: E501
    )
