from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from fxdp.compiler.verifier import verify
from fxdp.ir import redistributions
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import Cause, Location, meta
from fxdp.ir.graph.signature import Gradient, Input, Output, OutputSpec, Parameter
from fxdp.ir.network.link_cost import LinkCost
from fxdp.ir.types.placements import P, R, S
from fxdp.passes.bucket_gradients import BucketGradients, _cut_into_buckets
from tests.graphs import Sketch, after, mesh

aten = torch.ops.aten


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 30))
def test_buckets_have_the_closed_form(sizes: list[int], bucket: int) -> None:
    cuts = _cut_into_buckets(sizes, bucket)
    assert len(cuts) == math.ceil(sum(sizes) / bucket)
    pieces = [piece for cut in cuts for piece in cut]
    covered = [(p.gradient, i) for p in pieces for i in range(p.start, p.stop)]
    assert covered == [(g, i) for g, size in enumerate(sizes) for i in range(size)]
    assert all(p.start < p.stop for p in pieces)
    lengths = [sum(p.stop - p.start for p in cut) for cut in cuts]
    assert all(n == bucket for n in lengths[:-1])


def test_the_picture_in_the_docstring() -> None:
    shown = [
        "".join("abc"[p.gradient] * (p.stop - p.start) for p in cut)
        for cut in _cut_into_buckets([3, 4, 2], 5)
    ]
    assert shown == ["aaabb", "bbcc"]


class Gradients(Sketch):
    """Gradients of parameters, each a sum over the batch, reduced on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.add(Input(0, "x"), "f32[B, 2]", S(0))
        self.results: dict[OutputSpec, torch.fx.Node] = {}

    def reduced(self, name: str, type_: str, dims: list[int]) -> torch.fx.Node:
        value = self.call(
            aten.sum.dim_IntList, self.x, dims, type=type_, at=P, reads=(S(0),), name=name, backward=True
        )
        cause = Cause("output", name, Location(), f"gradient of {name}")
        pending = self.call(
            redistributions.all_reduce, value, "sum", type=type_, at=R, reads=(P,), cause=cause, backward=True
        )
        return self.call(redistributions.wait, pending, type=type_, at=R, reads=(R,), backward=True)

    def gradient(self, name: str, type_: str, dims: list[int]) -> None:
        self.results[Gradient(Parameter(name))] = self.reduced(name, type_, dims)

    def end(self) -> torch.fx.GraphModule:
        return self.returns(self.results, (R,) * len(self.results))


def test_two_gradients_travel_in_one_bucket() -> None:
    g = Gradients()
    g.gradient("w", "f32[2]", [0])
    g.gradient("v", "f32[1, 2]", [0])
    assert_expected_inline(
        after(BucketGradients(), g.end()),
        """\
mesh(dp=2)
  %x: f32[B, 2] {dp=S(0)} = input(x)
  %w: f32[2] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0])
  %reshape_default: f32[2] {dp=P(sum)} = aten.reshape(%w, [2])
  %v: f32[1, 2] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0])
  %reshape_default_1: f32[2] {dp=P(sum)} = aten.reshape(%v, [2])
  %cat_default: f32[4] {dp=P(sum)} = aten.cat([%reshape_default, %reshape_default_1])
  %all_reduce_2: f32[4] {dp=R} = all_reduce(%cat_default, sum)  # 2 gradients: gradient of w to v
  %wait_2: f32[4] {dp=R} = wait(%all_reduce_2)
  %slice_tensor: f32[2] {dp=R} = aten.slice.Tensor(%wait_2, 0, 0, 2)
  %slice_tensor_1: f32[2] {dp=R} = aten.slice.Tensor(%wait_2, 0, 2, 4)
  %view_default: f32[2] {dp=R} = aten.view(%slice_tensor, [2])
  %view_default_1: f32[1, 2] {dp=R} = aten.view(%slice_tensor_1, [1, 2])
  return gradient param(w)=%view_default, gradient param(v)=%view_default_1
""",
    )


def test_a_gradient_is_cut_between_buckets() -> None:
    g = Gradients()
    g.gradient("w", "f32[2]", [0])
    g.gradient("v", "f32[2]", [0])
    gm = g.end()
    assert_expected_inline(
        after(BucketGradients(bucket_bytes=12), gm),
        """\
mesh(dp=2)
  %x: f32[B, 2] {dp=S(0)} = input(x)
  %w: f32[2] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0])
  %reshape_default: f32[2] {dp=P(sum)} = aten.reshape(%w, [2])
  %v: f32[2] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0])
  %reshape_default_1: f32[2] {dp=P(sum)} = aten.reshape(%v, [2])
  %slice_tensor: f32[1] {dp=P(sum)} = aten.slice.Tensor(%reshape_default_1, 0, 0, 1)
  %cat_default: f32[3] {dp=P(sum)} = aten.cat([%reshape_default, %slice_tensor])
  %all_reduce_2: f32[3] {dp=R} = all_reduce(%cat_default, sum)  # 2 gradients: gradient of w to v
  %slice_tensor_1: f32[1] {dp=P(sum)} = aten.slice.Tensor(%reshape_default_1, 0, 1, 2)
  %all_reduce_3: f32[1] {dp=R} = all_reduce(%slice_tensor_1, sum)  # gradient of v
  %wait_2: f32[3] {dp=R} = wait(%all_reduce_2)
  %slice_tensor_2: f32[2] {dp=R} = aten.slice.Tensor(%wait_2, 0, 0, 2)
  %slice_tensor_3: f32[1] {dp=R} = aten.slice.Tensor(%wait_2, 0, 2, 3)
  %wait_3: f32[1] {dp=R} = wait(%all_reduce_3)
  %slice_tensor_4: f32[1] {dp=R} = aten.slice.Tensor(%wait_3, 0, 0, 1)
  %view_default: f32[2] {dp=R} = aten.view(%slice_tensor_2, [2])
  %cat_default_1: f32[2] {dp=R} = aten.cat([%slice_tensor_3, %slice_tensor_4])
  %view_default_1: f32[2] {dp=R} = aten.view(%cat_default_1, [2])
  return gradient param(w)=%view_default, gradient param(v)=%view_default_1
""",
    )
    verify(gm, Level.LOCAL, "bucket-gradients")


def test_dtypes_do_not_mix() -> None:
    g = Gradients()
    g.gradient("w", "f32[2]", [0])
    g.gradient("v", "bf16[2]", [0])
    gm = g.end()
    after(BucketGradients(), gm)
    assert len([n for n in gm.graph.nodes if n.target is redistributions.all_reduce]) == 2


def test_a_gradient_without_elements_is_not_reduced() -> None:
    g = Gradients()
    g.gradient("w", "f32[2]", [0])
    g.gradient("empty", "f32[0, 3]", [0])
    gm = g.end()
    assert_expected_inline(
        after(BucketGradients(), gm),
        """\
mesh(dp=2)
  %x: f32[B, 2] {dp=S(0)} = input(x)
  %w: f32[2] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0])
  %reshape_default: f32[2] {dp=P(sum)} = aten.reshape(%w, [2])
  %all_reduce_2: f32[2] {dp=R} = all_reduce(%reshape_default, sum)  # gradient of w
  %empty: f32[0, 3] {dp=P(sum)} = aten.sum.dim_IntList(%x, [0])
  %wait_2: f32[2] {dp=R} = wait(%all_reduce_2)
  %slice_tensor: f32[2] {dp=R} = aten.slice.Tensor(%wait_2, 0, 0, 2)
  %view_default: f32[2] {dp=R} = aten.view(%slice_tensor, [2])
  %zeros_like_default: f32[0, 3] {dp=R} = aten.zeros_like(%empty)
  return gradient param(w)=%view_default, gradient param(empty)=%zeros_like_default
""",
    )
    verify(gm, Level.LOCAL, "bucket-gradients")


def test_a_value_that_is_read_in_between_is_reduced_at_once() -> None:
    g = Gradients()
    norm = g.reduced("norm", "f32[2]", [0])
    scaled = g.call(aten.mul.Tensor, g.x, norm, type="f32[B, 2]", at=S(0), reads=(S(0), R))
    g.results[Output(0)] = scaled
    before = g.reduced("w", "f32[2]", [0])
    g.results[Gradient(Parameter("w"))] = before
    gm = g.returns(g.results, (S(0), R))
    after(BucketGradients(), gm)
    order = [n.name for n in gm.graph.nodes]
    assert order.index("wait") < order.index("mul_tensor")
    assert "wait_1" not in order, "the gradient's own wait is replaced by the bucket's"


def test_what_is_computed_from_a_reduced_gradient_moves_behind_the_wait() -> None:
    g = Gradients()
    done = g.reduced("w", "f32[2]", [0])
    half = g.call(aten.mul.Tensor, done, 0.5, type="f32[2]", at=R, reads=(R,), backward=True)
    g.results[Gradient(Parameter("w"))] = half
    g.gradient("v", "f32[2]", [0])
    gm = g.end()
    after(BucketGradients(), gm)
    verify(gm, Level.LOCAL, "bucket-gradients")
    causes = [meta(n).cause for n in gm.graph.nodes if n.target is redistributions.all_reduce]
    assert [c.text for c in causes if c] == ["2 gradients: gradient of w to v"]


def test_the_size_of_an_input_s_gradient_is_open() -> None:
    g = Gradients()
    g.gradient("w", "f32[2]", [0])
    g.results[Gradient(Input(0, "x"))] = g.reduced("x", "f32[B]", [0])
    gm = g.end()
    after(BucketGradients(), gm)
    waits = [n for n in gm.graph.nodes if n.target is redistributions.wait]
    assert len(waits) == 2
    verify(gm, Level.LOCAL, "bucket-gradients")


def test_one_rank_is_left_alone() -> None:
    g = Gradients()
    g.gradient("w", "f32[2]", [0])
    gm = g.end()
    assert "all_reduce" in after(BucketGradients(), gm, ranks=1)


def test_over_a_network_buckets_are_as_its_speed_asks() -> None:
    g = Gradients()
    for name in "abcd":
        g.gradient(name, "f32[128, 128]", [0])
    slow = replace(mesh(), link=LinkCost(1e-6, 1.0))
    gm = BucketGradients().run(g.end(), slow)
    assert len(gm.graph.find_nodes(op="call_function", target=redistributions.all_reduce)) == 4


def test_in_memory_there_are_two_buckets_where_one_would_be_there_with_all_activations() -> None:
    for rows, buckets in ((128, 1), (384, 2)):  # of four gradients of as many KiB
        g = Gradients()
        for name in "abcd":
            g.gradient(name, f"f32[{rows}, 256]", [0])
        gm = BucketGradients().run(g.end(), replace(mesh(), shared_memory=True))
        assert len(gm.graph.find_nodes(op="call_function", target=redistributions.all_reduce)) == buckets


@pytest.mark.parametrize("link", [None, LinkCost(1e-6, 1.0)])
@pytest.mark.parametrize("work", [False, True])
def test_over_a_network_a_bucket_starts_after_the_sums_that_come_before_the_next_work(
    link: LinkCost | None, *, work: bool
) -> None:
    g = Gradients()
    g.gradient("w", "f32[128, 128]", [0])
    if work:
        g.call(aten.mm.default, g.x, g.x, type="f32[2, 2]", at=P, reads=(S(0), S(0)), backward=True)
    total = g.reduced("norm", "f32[2]", [0])  # as in BatchNorm's backward
    g.results[Output(0)] = g.call(aten.neg.default, total, type="f32[2]", at=R, reads=(R,), backward=True)
    gm = BucketGradients().run(g.end(), replace(mesh(), link=link))
    verify(gm, Level.LOCAL, "bucket-gradients")
    starts = gm.graph.find_nodes(op="call_function", target=redistributions.all_reduce)
    order = [meta(node).reason == "bucket" for node in starts]
    assert order == ([True, False] if work or link is None else [False, True])
    if order == [False, True]:
        assert next(iter(starts[0].users)) < starts[1]  # not only started: waited for
