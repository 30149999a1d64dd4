from __future__ import annotations

from dataclasses import replace

import torch
from expecttest import assert_expected_inline

from fxdp.ir.graph.signature import Gradient, Input, Output, Parameter, Tangent
from fxdp.ir.types.mesh import mesh_of
from fxdp.ir.types.placements import P, R, S
from fxdp.passes.insert_collectives import InsertCollectives
from fxdp.passes.place_parameters import PlaceParameters
from tests.graphs import Sketch, after, text

aten = torch.ops.aten


def linear() -> Sketch:
    """`y = x @ w.t()` with its backward, and a parameter without dims."""
    g = Sketch()
    w = g.add(Parameter("w"), "f32[5, 4]", R)
    scale = g.add(Parameter("scale"), "f32[]", R)
    x = g.add(Input(0, "x"), "f32[B, 4]", S(0))
    tangent = g.add(Tangent(0), "f32[B, 5]", S(0))
    t = g.call(aten.t.default, w, type="f32[4, 5]", at=R, reads=(R,), name="t")
    y = g.call(aten.mm.default, x, t, type="f32[B, 5]", at=S(0), reads=(S(0), R), name="y")
    out = g.call(aten.mul.Tensor, y, scale, type="f32[B, 5]", at=S(0), reads=(S(0), R), name="out")
    back = {"backward": True}
    again = g.call(aten.t.default, t, type="f32[5, 4]", at=R, reads=(R,), name="t_back", **back)
    dx_type = {"type": "f32[B, 4]", **back}
    dx = g.call(aten.mm.default, tangent, again, at=S(0), reads=(S(0), R), name="dx", **dx_type)
    turned = g.call(aten.t.default, tangent, type="f32[5, B]", at=S(1), reads=(S(0),), name="turned", **back)
    dw = g.call(aten.mm.default, turned, x, type="f32[5, 4]", at=P, reads=(S(1), S(0)), name="dw", **back)
    g.results = {Output(0): out, Gradient(Input(0, "x")): dx, Gradient(Parameter("w")): dw}
    return g


def placed(*, unsharded_once: bool = False) -> torch.fx.GraphModule:
    g = linear()
    gm = g.returns(g.results, (S(0), S(0), R))
    return PlaceParameters(unsharded_once).run(gm, mesh_of({"dp": 2}, "cpu"))


def test_parameters_lie_in_rows_and_the_backward_has_views_of_its_own() -> None:
    g = linear()
    gm = g.returns(g.results, (S(0), S(0), R))
    assert_expected_inline(
        after(PlaceParameters(), gm),
        """\
mesh(dp=2)
  %w: f32[5, 4] {dp=ParamShard} = param(w)
  %scale: f32[] {dp=R} = param(scale)
  %x: f32[B, 4] {dp=S(0)} = input(x)
  %tangent: f32[B, 5] {dp=S(0)} = tangent(0)
  %t: f32[4, 5] {dp=R} = aten.t(%w)
  %y: f32[B, 5] {dp=S(0)} = aten.mm(%x, %t)
  %out: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%y, %scale)
  %t_1: f32[4, 5] {dp=R} = aten.t(%w)
  %t_back: f32[5, 4] {dp=R} = aten.t(%t_1)
  %dx: f32[B, 4] {dp=S(0)} = aten.mm(%tangent, %t_back)
  %turned: f32[5, B] {dp=S(1)} = aten.t(%tangent)
  %dw: f32[5, 4] {dp=P(sum)} = aten.mm(%turned, %x)
  return output 0=%out, gradient input(x)=%dx, gradient param(w)=%dw
""",
    )


def test_gathered_once_the_backward_reads_the_forwards_views() -> None:
    assert "t_1" not in text(placed(unsharded_once=True))


def test_the_backward_gathers_among_neighbours() -> None:
    four = replace(mesh_of({"dp": 4}, "cpu"), post_forward_size=2)
    assert_expected_inline(
        text(InsertCollectives().run(placed(), four)),
        """\
mesh(dp=2)
  %w: f32[5, 4] {dp=ParamShard} = param(w)
  %scale: f32[] {dp=R} = param(scale)
  %x: f32[B, 4] {dp=S(0)} = input(x)
  %tangent: f32[B, 5] {dp=S(0)} = tangent(0)
  %all_gather_shards: f32[5, 4] {dp=R} = all_gather_shards(%w)  # aten.t
  %wait: f32[5, 4] {dp=R} = wait(%all_gather_shards)
  %slice_shard: f32[5, 4] {dp=ParamShard(regather)} = slice_shard(%wait, axis=regather)  # aten.t
  %all_gather_shards_1: f32[5, 4] {dp=R} = all_gather_shards(%slice_shard, axis=regather)  # aten.t
  %t: f32[4, 5] {dp=R} = aten.t(%wait)
  %y: f32[B, 5] {dp=S(0)} = aten.mm(%x, %t)
  %out: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%y, %scale)
  %wait_1: f32[5, 4] {dp=R} = wait(%all_gather_shards_1)
  %t_1: f32[4, 5] {dp=R} = aten.t(%wait_1)
  %t_back: f32[5, 4] {dp=R} = aten.t(%t_1)
  %dx: f32[B, 4] {dp=S(0)} = aten.mm(%tangent, %t_back)
  %turned: f32[5, B] {dp=S(1)} = aten.t(%tangent)
  %dw: f32[5, 4] {dp=P(sum)} = aten.mm(%turned, %x)
  %reduce_scatter_shards: f32[5, 4] {dp=ParamShard} = reduce_scatter_shards(%dw)  # gradient of w
  %wait_2: f32[5, 4] {dp=ParamShard} = wait(%reduce_scatter_shards)
  return output 0=%out, gradient input(x)=%dx, gradient param(w)=%wait_2
""",
    )


def test_each_phase_gathers_for_itself_and_gradients_are_dealt_out() -> None:
    assert_expected_inline(
        after(InsertCollectives(), placed()),
        """\
mesh(dp=2)
  %w: f32[5, 4] {dp=ParamShard} = param(w)
  %scale: f32[] {dp=R} = param(scale)
  %x: f32[B, 4] {dp=S(0)} = input(x)
  %tangent: f32[B, 5] {dp=S(0)} = tangent(0)
  %all_gather_shards_1: f32[5, 4] {dp=R} = all_gather_shards(%w)  # aten.t
  %all_gather_shards: f32[5, 4] {dp=R} = all_gather_shards(%w)  # aten.t
  %wait: f32[5, 4] {dp=R} = wait(%all_gather_shards)
  %t: f32[4, 5] {dp=R} = aten.t(%wait)
  %y: f32[B, 5] {dp=S(0)} = aten.mm(%x, %t)
  %out: f32[B, 5] {dp=S(0)} = aten.mul.Tensor(%y, %scale)
  %wait_1: f32[5, 4] {dp=R} = wait(%all_gather_shards_1)
  %t_1: f32[4, 5] {dp=R} = aten.t(%wait_1)
  %t_back: f32[5, 4] {dp=R} = aten.t(%t_1)
  %dx: f32[B, 4] {dp=S(0)} = aten.mm(%tangent, %t_back)
  %turned: f32[5, B] {dp=S(1)} = aten.t(%tangent)
  %dw: f32[5, 4] {dp=P(sum)} = aten.mm(%turned, %x)
  %reduce_scatter_shards: f32[5, 4] {dp=ParamShard} = reduce_scatter_shards(%dw)  # gradient of w
  %wait_2: f32[5, 4] {dp=ParamShard} = wait(%reduce_scatter_shards)
  return output 0=%out, gradient input(x)=%dx, gradient param(w)=%wait_2
""",
    )


def test_gathered_once_there_is_one_gather() -> None:
    gm = InsertCollectives(unsharded_once=True).run(placed(unsharded_once=True), mesh_of({"dp": 2}, "cpu"))
    assert text(gm).count("= all_gather_shards(") == 1


def test_rows_along_one_of_two_axes_are_summed_along_the_other() -> None:
    mesh = mesh_of({"dp_replicate": 2, "dp_shard": 2}, "cpu")
    g = linear()
    gm = PlaceParameters().run(g.returns(g.results, (S(0), S(0), R)), mesh)
    gm = InsertCollectives().run(gm, mesh)
    names = [n.target.__name__ for n in gm.graph.nodes if "shard" in str(n.target)]
    assert names == ["all_gather_shards", "all_gather_shards", "reduce_scatter_shards", "all_reduce_shards"]
    axes = [n.kwargs["axis"] for n in gm.graph.nodes if "shard" in str(n.target)]
    assert axes == ["dp_shard", "dp_shard", "dp_shard", "dp_replicate"]


def test_along_an_axis_of_one_rank_nothing_changes() -> None:
    g = linear()
    gm = g.returns(g.results, (S(0), S(0), R))
    before = text(gm)
    assert text(PlaceParameters().run(gm, mesh_of({"dp_replicate": 2, "dp_shard": 1}, "cpu"))) == before


def test_a_cast_to_fewer_bytes_reads_rows_and_its_result_is_gathered() -> None:
    """In both phases; a cast to more bytes stays where it is, after the gather."""
    g = Sketch()
    narrow = g.add(Parameter("narrow"), "f32[5, 4]", R)
    wide = g.add(Parameter("wide"), "f32[4]", R)
    x = g.add(Input(0, "x"), "bf16[B, 4]", S(0))
    to = {"at": R, "reads": (R,)}
    less = g.call(aten._to_copy.default, narrow, type="bf16[5, 4]", name="less", **to)
    more = g.call(aten._to_copy.default, wide, type="f64[4]", name="more", **to)
    t = g.call(aten.t.default, less, type="bf16[4, 5]", at=R, reads=(R,), name="t")
    y = g.call(aten.mm.default, x, t, type="bf16[B, 5]", at=S(0), reads=(S(0), R), name="y")
    back = {"backward": True}
    dx = g.call(aten.mm.default, y, less, type="bf16[B, 4]", at=S(0), reads=(S(0), R), name="dx", **back)
    gm = g.returns({Output(0): y, Output(1): more, Gradient(Input(0, "x")): dx}, (S(0), R, S(0)))
    placed = PlaceParameters().run(gm, mesh_of({"dp": 2}, "cpu"))
    assert_expected_inline(
        after(InsertCollectives(), placed),
        """\
mesh(dp=2)
  %narrow: f32[5, 4] {dp=ParamShard} = param(narrow)
  %wide: f32[4] {dp=ParamShard} = param(wide)
  %x: bf16[B, 4] {dp=S(0)} = input(x)
  %all_gather_shards: f32[4] {dp=R} = all_gather_shards(%wide)  # output 1
  %less: bf16[5, 4] {dp=ParamShard} = aten._to_copy(%narrow)
  %all_gather_shards_2: bf16[5, 4] {dp=R} = all_gather_shards(%less)  # aten.mm
  %all_gather_shards_1: bf16[5, 4] {dp=R} = all_gather_shards(%less)  # aten.t
  %wait: f32[4] {dp=R} = wait(%all_gather_shards)
  %more: f64[4] {dp=R} = aten._to_copy(%wait)
  %wait_1: bf16[5, 4] {dp=R} = wait(%all_gather_shards_1)
  %t: bf16[4, 5] {dp=R} = aten.t(%wait_1)
  %y: bf16[B, 5] {dp=S(0)} = aten.mm(%x, %t)
  %wait_2: bf16[5, 4] {dp=R} = wait(%all_gather_shards_2)
  %dx: bf16[B, 4] {dp=S(0)} = aten.mm(%y, %wait_2)
  return output 0=%y, output 1=%more, gradient input(x)=%dx
""",
    )


def test_a_parameter_by_name_stays_for_the_backward_and_travels_apart() -> None:
    mesh, kept = mesh_of({"dp": 2}, "cpu"), frozenset({"w"})
    g = linear()
    gm = PlaceParameters(kept=kept).run(g.returns(g.results, (S(0), S(0), R)), mesh)
    assert "t_1" not in text(gm)
    gm = InsertCollectives(kept=kept).run(gm, mesh)
    assert text(gm).count("= all_gather_shards(") == 1
