from __future__ import annotations

from itertools import pairwise

from expecttest import assert_expected_inline
from torch import fx

from fxdp.ir import conversions
from fxdp.ir.notes import note
from fxdp.passes.bucket_rows import BucketRows
from fxdp.passes.schedule_rows import ScheduleRows
from tests.graphs import after, mesh
from tests.passes.test_bucket_rows import two_layers


def _bucketed(room: int) -> fx.GraphModule:
    return BucketRows(bucket_bytes=room).run(two_layers(), mesh())


def test_a_bucket_starts_before_the_one_before_it_is_used() -> None:
    assert_expected_inline(after(ScheduleRows(), _bucketed(20)), """\
mesh(dp=2)
  %b: f32[5] {dp=Rows} = param(b)
  %a: f32[5] {dp=Rows} = param(a)
  %x: f32[B, 5] {dp=S(0)} = input(x)
  %tangent: f32[B, 5] {dp=S(0)} = tangent(0)
  %gather_rows_3: f32[6] {dp=R} = gather_rows([%a], [3], [])  # a for aten.mul.Tensor
  %wait_5: f32[6] {dp=R} = wait(%gather_rows_3)
  %slice_tensor: f32[5] {dp=R} = aten.slice.Tensor(%wait_5, 0, 0, 5)
  %view_default: f32[5] {dp=R} = aten.view(%slice_tensor, [5])
  %gather_rows_4: f32[6] {dp=R} = gather_rows([%b], [3], [%x, %gather_rows_3])  # b for aten.mul.Tensor
  %h: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%x, %view_default)
  %wait_6: f32[6] {dp=R} = wait(%gather_rows_4)
  %slice_tensor_1: f32[5] {dp=R} = aten.slice.Tensor(%wait_6, 0, 0, 5)
  %view_default_1: f32[5] {dp=R} = aten.view(%slice_tensor_1, [5])
  %y: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%h, %view_default_1)
  %gb: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%tangent, %h)
  %db: f32[5] {dp=P(sum)} = aten.sum.dim_IntList(%gb, [0])
  %scatter_rows_2: f32[6] {dp=Rows} = scatter_rows([%db], [3], [])  # gradient of b
  %gather_rows_5: f32[6] {dp=R} = gather_rows([%b], [3], [%tangent, %scatter_rows_2])  # b for aten.mul.Tensor
  %wait_7: f32[6] {dp=R} = wait(%gather_rows_5)
  %slice_tensor_2: f32[5] {dp=R} = aten.slice.Tensor(%wait_7, 0, 0, 5)
  %view_default_2: f32[5] {dp=R} = aten.view(%slice_tensor_2, [5])
  %gh: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%tangent, %view_default_2)
  %ga: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%gh, %x)
  %da: f32[5] {dp=P(sum)} = aten.sum.dim_IntList(%ga, [0])
  %scatter_rows_3: f32[6] {dp=Rows} = scatter_rows([%da], [3], [%gather_rows_5])  # gradient of a
  %wait_8: f32[6] {dp=Rows} = wait(%scatter_rows_2)
  %wait_9: f32[6] {dp=Rows} = wait(%scatter_rows_3)
  %slice_tensor_3: f32[5] {dp=Rows} = aten.slice.Tensor(%wait_8, 0, 0, 3)
  %view_default_3: f32[5] {dp=Rows} = aten.view(%slice_tensor_3, [3])
  %slice_tensor_4: f32[5] {dp=Rows} = aten.slice.Tensor(%wait_9, 0, 0, 3)
  %view_default_4: f32[5] {dp=Rows} = aten.view(%slice_tensor_4, [3])
  return output 0=%y, gradient param(b)=%view_default_3, gradient param(a)=%view_default_4
""")


def test_all_starts_of_a_phase_stand_in_one_order() -> None:
    gm = ScheduleRows().run(_bucketed(20), mesh())
    for backward in (False, True):
        ordered = [n for n in gm.graph.nodes if n.target in conversions.ORDERED]
        starts = [n for n in ordered if note(n).backward is backward]
        assert len(starts) > 1
        for before, start in pairwise(starts):
            assert before in start.args[2]


def test_the_backwards_first_gather_reads_what_a_tangent_made() -> None:
    gm = ScheduleRows().run(_bucketed(1000), mesh())
    gathers = gm.graph.find_nodes(op="call_function", target=conversions.gather_rows)
    (backward,) = [n for n in gathers if note(n).backward]
    assert [n.name for n in backward.args[2]] == ["tangent"]


def test_gathers_come_first_where_whole_values_stay() -> None:
    gm = BucketRows(bucket_bytes=20).run(two_layers(gathered_once=True), mesh())
    assert_expected_inline(after(ScheduleRows(first=True), gm), """\
mesh(dp=2)
  %b: f32[5] {dp=Rows} = param(b)
  %a: f32[5] {dp=Rows} = param(a)
  %x: f32[B, 5] {dp=S(0)} = input(x)
  %tangent: f32[B, 5] {dp=S(0)} = tangent(0)
  %gather_rows_2: f32[6] {dp=R} = gather_rows([%a], [3], [])  # a for aten.mul.Tensor
  %gather_rows_3: f32[6] {dp=R} = gather_rows([%b], [3], [%gather_rows_2])  # b for aten.mul.Tensor
  %wait_4: f32[6] {dp=R} = wait(%gather_rows_2)
  %slice_tensor: f32[5] {dp=R} = aten.slice.Tensor(%wait_4, 0, 0, 5)
  %view_default: f32[5] {dp=R} = aten.view(%slice_tensor, [5])
  %wait_5: f32[6] {dp=R} = wait(%gather_rows_3)
  %slice_tensor_1: f32[5] {dp=R} = aten.slice.Tensor(%wait_5, 0, 0, 5)
  %view_default_1: f32[5] {dp=R} = aten.view(%slice_tensor_1, [5])
  %h: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%x, %view_default)
  %y: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%h, %view_default_1)
  %gb: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%tangent, %h)
  %db: f32[5] {dp=P(sum)} = aten.sum.dim_IntList(%gb, [0])
  %scatter_rows_2: f32[6] {dp=Rows} = scatter_rows([%db], [3], [])  # gradient of b
  %gh: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%tangent, %view_default_1)
  %ga: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%gh, %x)
  %da: f32[5] {dp=P(sum)} = aten.sum.dim_IntList(%ga, [0])
  %scatter_rows_3: f32[6] {dp=Rows} = scatter_rows([%da], [3], [%scatter_rows_2])  # gradient of a
  %wait_6: f32[6] {dp=Rows} = wait(%scatter_rows_2)
  %wait_7: f32[6] {dp=Rows} = wait(%scatter_rows_3)
  %slice_tensor_2: f32[5] {dp=Rows} = aten.slice.Tensor(%wait_6, 0, 0, 3)
  %view_default_2: f32[5] {dp=Rows} = aten.view(%slice_tensor_2, [3])
  %slice_tensor_3: f32[5] {dp=Rows} = aten.slice.Tensor(%wait_7, 0, 0, 3)
  %view_default_3: f32[5] {dp=Rows} = aten.view(%slice_tensor_3, [3])
  return output 0=%y, gradient param(b)=%view_default_2, gradient param(a)=%view_default_3
""")
