from __future__ import annotations

import operator
import re

import torch
from expecttest import assert_expected_inline
from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.signature import Input, Output
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import P, R, S
from fxdp.passes.localize_shapes import LocalizeShapes
from tests.graphs import Sketch, after

aten = torch.ops.aten


def test_the_sharded_dim_of_a_size_list_is_local() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 2, 3]", S(0))
    size = g.call(aten.sym_size.int, x, 0, type="int(B)")
    double = g.call(operator.mul, size, 2, type="int(B*2)")
    gm = g.returns(
        {Output(0): g.call(aten.view.default, x, [double, -1], type="f32[B*2, 3]", at=S(0), reads=(S(0),))}
    )
    assert_expected_inline(
        after(LocalizeShapes(), gm),
        """\
mesh(dp=2)
  %global_batch: int(B) = size(B)
  %local_batch: int(b) = size(b)
  %offset: int(offset) = size(offset)
  %x: f32[B, 2, 3] {dp=S(0)} = input(x)
  %mul_1: int(2*b) = mul(2, %local_batch)
  %view_default: f32[2*B, 3] {dp=S(0)} = aten.reshape(%x, [%mul_1, 3])
  return output 0=%view_default
""",
    )


def test_the_sizes_of_a_replicated_value_are_global() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 3]", S(0))
    size = g.call(aten.sym_size.int, x, 0, type="int(B)")
    gm = g.returns({Output(0): g.call(aten.full.default, [size, 2], 0.5, type="f32[B, 2]", at=R)})
    assert_expected_inline(
        after(LocalizeShapes(), gm),
        """\
mesh(dp=2)
  %global_batch: int(B) = size(B)
  %local_batch: int(b) = size(b)
  %offset: int(offset) = size(offset)
  %x: f32[B, 3] {dp=S(0)} = input(x)
  %full_default: f32[B, 2] {dp=R} = aten.full([%global_batch, 2], 0.5)
  return output 0=%full_default
""",
    )


def test_divisors_and_arange_ends_are_global() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    size = g.call(aten.sym_size.int, x, 0, type="int(B)")
    less = g.call(operator.sub, size, 1, type="int(B - 1)")
    total = g.call(aten.sum.default, x, type="f32[]", at=P, reads=(S(0),))
    mean = g.call(aten.div.Tensor, total, less, type="f32[]", at=P, reads=(P,))
    count = g.call(aten.arange.default, size, type="i64[B]", at=R)
    gm = g.returns({Output(0): mean, Output(1): count})
    assert_expected_inline(
        after(LocalizeShapes(), gm),
        """\
mesh(dp=2)
  %global_batch: int(B) = size(B)
  %local_batch: int(b) = size(b)
  %offset: int(offset) = size(offset)
  %x: f32[B] {dp=S(0)} = input(x)
  %sum_default: f32[] {dp=P(sum)} = aten.sum(%x)
  %add: int(B - 1) = add(-1, %global_batch)
  %div_tensor: f32[] {dp=P(sum)} = aten.div.Tensor(%sum_default, %add)
  %arange_default: i64[B] {dp=R} = aten.arange(%global_batch)
  return output 0=%div_tensor, output 1=%arange_default
""",
    )


def test_a_rewrite_counts_the_rank_s_own_batch() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B*4]", S(0))
    size = g.call(aten.sym_size.int, x, 0, type="int(B*4)")
    local = Rewrite(local=("end",))
    half = g.call(aten.slice.Tensor, x, 0, 0, size, type="f32[B*4]", at=S(0), reads=(S(0),), rewrite=local)
    gm = g.returns({Output(0): half})
    assert_expected_inline(
        after(LocalizeShapes(), gm),
        """\
mesh(dp=2)
  %global_batch: int(B) = size(B)
  %local_batch: int(b) = size(b)
  %offset: int(offset) = size(offset)
  %x: f32[4*B] {dp=S(0)} = input(x)
  %mul: int(4*b) = mul(4, %local_batch)
  %slice_tensor: f32[4*B] {dp=S(0)} = aten.slice.Tensor(%x, 0, 0, %mul)
  return output 0=%slice_tensor
""",
    )


def test_global_row_numbers_count_from_the_rank_s_first_row() -> None:
    g = Sketch()
    x, rows = g.add(Input(0, "x"), "f32[B, 2]", S(0)), g.add(Input(1, "rows"), "i64[B]", S(0))
    shift = Rewrite(minus_offset=(1,))
    taken = g.call(
        aten.index_select.default, x, 0, rows, type="f32[B, 2]", at=S(0), reads=(S(0), S(0)), rewrite=shift
    )
    gm = g.returns({Output(0): taken})
    assert_expected_inline(
        after(LocalizeShapes(), gm),
        """\
mesh(dp=2)
  %global_batch: int(B) = size(B)
  %local_batch: int(b) = size(b)
  %offset: int(offset) = size(offset)
  %x: f32[B, 2] {dp=S(0)} = input(x)
  %rows: i64[B] {dp=S(0)} = input(rows)
  %sub_tensor: i64[B] {dp=S(0)} = aten.sub.Tensor(%rows, %offset)
  %index_select_default: f32[B, 2] {dp=S(0)} = aten.index_select(%x, 0, %sub_tensor)
  return output 0=%index_select_default
""",
    )


def test_a_number_read_from_data_stays_a_node() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 3]", S(0))
    item = g.call(aten.item.default, x, type="int(s0)", reads=(R,))
    more = g.call(operator.add, item, 1, type="int(s0 + 1)")
    gm = g.returns({Output(0): g.call(aten.zeros.default, [more], type="f32[s0 + 1]", at=R)})
    assert_expected_inline(
        after(LocalizeShapes(), gm),
        """\
mesh(dp=2)
  %global_batch: int(B) = size(B)
  %local_batch: int(b) = size(b)
  %offset: int(offset) = size(offset)
  %x: f32[B, 3] {dp=S(0)} = input(x)
  %item_default: int(s0) = aten.item(%x)
  %add: int(s0 + 1) = add(%item_default, 1)
  %zeros_default: f32[s0 + 1] {dp=R} = aten.zeros([%add])
  return output 0=%zeros_default
""",
    )


def test_other_dynamic_sizes_get_slots() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, s0]", S(0))
    length = g.call(aten.sym_size.int, x, 1, type="int(s0)")
    gm = g.returns(
        {Output(0): g.call(aten.view.default, x, [-1, length], type="f32[B, s0]", at=S(0), reads=(S(0),))}
    )
    assert_expected_inline(
        after(LocalizeShapes(("s0",)), gm),
        """\
mesh(dp=2)
  %global_batch: int(B) = size(B)
  %local_batch: int(b) = size(b)
  %offset: int(offset) = size(offset)
  %s0: int(s0) = size(s0)
  %x: f32[B, s0] {dp=S(0)} = input(x)
  %view_default: f32[B, s0] {dp=S(0)} = aten.reshape(%x, [%local_batch, %s0])
  return output 0=%view_default
""",
    )


def test_an_outer_factor_with_a_dynamic_size_is_a_node() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B*s0]", R)
    from fxdp.ir.graph.metadata import meta
    from fxdp.ir.types.value_types import TensorType

    s0 = meta(x).type.shape[0].args[1] if isinstance(meta(x).type, TensorType) else None  # type: ignore
    cut = g.call(redistributions.shard, x, 0, s0, type="f32[B*s0]", at=S(0, s0), reads=(R,))
    gm = g.returns(
        {Output(0): g.call(aten.neg.default, cut, type="f32[B*s0]", at=S(0, s0), reads=(S(0, s0),))}
    )
    assert "shard(%x, 0, %s0)" in after(LocalizeShapes(("s0",)), gm)


def test_each_step_of_the_arithmetic_shows_its_own_value() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    size = g.call(aten.sym_size.int, x, 0, type="int(3*B*(B - 1))")
    gm = g.returns({Output(0): g.call(aten.div.Tensor, x, size, type="f32[B]", at=S(0), reads=(S(0),))})
    assert_expected_inline(
        after(LocalizeShapes(), gm),
        """\
mesh(dp=2)
  %global_batch: int(B) = size(B)
  %local_batch: int(b) = size(b)
  %offset: int(offset) = size(offset)
  %x: f32[B] {dp=S(0)} = input(x)
  %add: int(B - 1) = add(-1, %global_batch)
  %mul: int(3*B) = mul(3, %global_batch)
  %mul_1: int(3*B*(B - 1)) = mul(%mul, %add)
  %div_tensor: f32[B] {dp=S(0)} = aten.div.Tensor(%x, %mul_1)
  return output 0=%div_tensor
""",
    )


def test_what_a_kernel_reads_as_it_lies_is_laid_so_once() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 4]", S(0))
    m = g.add(Input(1, "m"), "f32[B]", S(0))

    def call(name: str, grad: fx.Node) -> fx.Node:
        back = g.call(
            aten.native_layer_norm_backward.default, grad, x, [4], m, m, None, None, [True, False, False],
            type="(f32[B, 4])", at=(S(0),), reads=(S(0),) * 4, name=name,
        )  # fmt: skip
        return g.call(operator.getitem, back, 0, type="f32[B, 4]", at=S(0))

    gm = g.returns({Output(0): call("again", call("back", x))})
    found = re.findall(r"%(contiguous.*|.*native.*)", after(LocalizeShapes(), gm))
    assert "\n".join(found).replace(": (f32[B, 4]) {dp=S(0)}", "") == (
        "contiguous_default: f32[B] {dp=S(0)} = aten.contiguous(%m)\n"
        "back = aten.native_layer_norm_backward(%x, %x, [4], %contiguous_default, %contiguous_default, "
        "None, None, [True, False, False])\n"
        "again = aten.native_layer_norm_backward(%getitem, %x, [4], %contiguous_default, "
        "%contiguous_default, None, None, [True, False, False])"
    )
