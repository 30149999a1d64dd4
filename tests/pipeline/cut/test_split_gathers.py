from __future__ import annotations

from expecttest import assert_expected_inline
from torch import fx

from fxdp.compiler.executable import _gathered_keys
from fxdp.ir.graph.graph_text import graph_text
from fxdp.passes import BucketParameters, SchedulePrefetch
from fxdp.pipeline.cut.split import split_gathers
from tests.graphs import mesh
from tests.passes.test_bucket_parameters import two_layers


def _scheduled(*, first: bool) -> fx.GraphModule:
    gm = BucketParameters().run(two_layers(unsharded_once=True), mesh())
    return SchedulePrefetch(first).run(gm, mesh())


def test_the_gathers_are_a_part_of_their_own() -> None:
    partition = split_gathers(_scheduled(first=True))
    (gather,), (part,) = partition.gathers, partition.parts
    assert gather is not None
    text = "\n".join(graph_text(p.gm, {"dp": 2}) for p in (gather, part))
    assert_expected_inline(
        text,
        """\
mesh(dp=2)
  %b: f32[5] {dp=ParamShard} = param(b)
  %a: f32[5] {dp=ParamShard} = param(a)
  %all_gather_shards_2: f32[12] {dp=R} = all_gather_shards([%b, %a], [3, 3], [])  # a and 1 more for aten.mul.Tensor
  %wait_4: f32[12] {dp=R} = wait(%all_gather_shards_2)
  %slice_tensor: f32[5] {dp=R} = aten.slice.Tensor(%wait_4, 0, 0, 5)
  %view_default: f32[5] {dp=R} = aten.view(%slice_tensor, [5])
  %slice_tensor_1: f32[5] {dp=R} = aten.slice.Tensor(%wait_4, 0, 6, 11)
  %view_default_1: f32[5] {dp=R} = aten.view(%slice_tensor_1, [5])
  return to view_default=%view_default, to view_default_1=%view_default_1
mesh(dp=2)
  %b: f32[5] {dp=ParamShard} = param(b)
  %a: f32[5] {dp=ParamShard} = param(a)
  %x: f32[B, 5] {dp=S(0)} = input(x)
  %tangent: f32[B, 5] {dp=S(0)} = tangent(0)
  %view_default: f32[5] {dp=R} = from(view_default)
  %view_default_1: f32[5] {dp=R} = from(view_default_1)
  %h: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%x, %view_default_1)
  %y: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%h, %view_default)
  %gb: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%tangent, %h)
  %db: f32[5] {dp=P(sum)} = aten.sum.dim_IntList(%gb, [0])
  %gh: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%tangent, %view_default)
  %ga: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%gh, %x)
  %da: f32[5] {dp=P(sum)} = aten.sum.dim_IntList(%ga, [0])
  %reduce_scatter_shards_2: f32[12] {dp=ParamShard} = reduce_scatter_shards([%db, %da], [3, 3], [])  # 2 gradients: gradient of b to a
  %wait_5: f32[12] {dp=ParamShard} = wait(%reduce_scatter_shards_2)
  %slice_tensor_2: f32[5] {dp=ParamShard} = aten.slice.Tensor(%wait_5, 0, 0, 3)
  %view_default_2: f32[5] {dp=ParamShard} = aten.view(%slice_tensor_2, [3])
  %slice_tensor_3: f32[5] {dp=ParamShard} = aten.slice.Tensor(%wait_5, 0, 3, 6)
  %view_default_3: f32[5] {dp=ParamShard} = aten.view(%slice_tensor_3, [3])
  return output 0=%y, gradient param(b)=%view_default_2, gradient param(a)=%view_default_3""",  # noqa: E501
    )


def test_what_parts_give_is_known_by_parameter_and_dtype() -> None:
    partition = split_gathers(_scheduled(first=True))
    found = _gathered_keys(partition, [0], 0)
    (gather,) = partition.gathers
    assert gather is not None
    assert tuple(found.own) == gather.gives
    assert {(name, str(dtype)) for name, dtype in found.own.values()} == {
        ("a", "torch.float32"), ("b", "torch.float32"),
    }  # fmt: skip
    assert {place[0] for place in found.places} == {0}


def test_a_program_without_sharded_parameters_has_no_such_part() -> None:
    gm = split_gathers(_scheduled(first=True)).parts[0].gm
    assert split_gathers(gm).gathers == ()
