from __future__ import annotations

import operator
from dataclasses import replace

import torch
from expecttest import assert_expected_inline

from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Gradient, Input, Output, OutputSpec, Parameter
from fxdp.ir.network.link_cost import LinkCost
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import P, R, S
from fxdp.passes.bucket_sufficient_factors import BucketSufficientFactors
from fxdp.passes.gather_sufficient_factors import GatherSufficientFactors
from fxdp.passes.insert_collectives import InsertCollectives
from tests.graphs import Sketch, mesh, text

aten = torch.ops.aten

SLOW: Mesh = replace(mesh(), link=LinkCost.of_speed(0.01))


class Layers(Sketch):
    """Backwards of linear layers, one after another, and what comes back to the samples at last."""

    def __init__(self, dtype: str = "f32") -> None:
        super().__init__()
        self.dtype = dtype
        self.back = self.add(Input(0, "back"), f"{dtype}[B, 90]", S(0))
        self.results: dict[OutputSpec, torch.fx.Node] = {}

    def layer(self, name: str) -> None:
        x = self.add(Input(len(self.results) + 1, name), f"{self.dtype}[B, 90]", S(0))
        t = self.call(
            aten.t.default, self.back, type=f"{self.dtype}[90, B]", at=S(1), reads=(S(0),), backward=True
        )
        self.results[Gradient(Parameter(name))] = self.call(
            aten.mm.default, t, x, type=f"{self.dtype}[90, 90]", at=P, reads=(S(1), S(0)), backward=True
        )
        self.back = self.call(
            aten.neg.default, self.back, type=f"{self.dtype}[B, 90]", at=S(0), reads=(S(0),),
            name=f"from_{name}", backward=True,
        )  # fmt: skip

    def explicit(self, batch: int = 4) -> torch.fx.GraphModule:
        gm = self.returns({**self.results, Output(0): self.back}, (*[R] * len(self.results), S(0)))
        GatherSufficientFactors(batch).run(gm, SLOW)
        return InsertCollectives().run(gm, SLOW)


def bucketed(gm: torch.fx.GraphModule, batch: int = 4, process_mesh: Mesh = SLOW) -> torch.fx.GraphModule:
    BucketSufficientFactors(batch).run(gm, process_mesh)
    gm.graph.lint()
    return gm


def starts(gm: torch.fx.GraphModule) -> list[str]:
    found = gm.graph.find_nodes(op="call_function", target=redistributions.all_gather)
    return [cause.text for n in found if (cause := meta(n).cause)]


def test_factors_of_two_layers_travel_side_by_side_and_are_multiplied_at_the_end() -> None:
    g = Layers()
    g.layer("b")
    g.layer("a")
    assert_expected_inline(
        text(bucketed(g.explicit())),
        """\
mesh(dp=2)
  %back: f32[B, 90] {dp=S(0)} = input(back)
  %b: f32[B, 90] {dp=S(0)} = input(b)
  %from_b: f32[B, 90] {dp=S(0)} = aten.neg(%back)
  %a: f32[B, 90] {dp=S(0)} = input(a)
  %cat_default: f32[B, 360] {dp=S(0)} = aten.cat([%back, %b, %from_b, %a], 1)
  %all_gather_4: f32[B, 360] {dp=R} = all_gather(%cat_default, 0, 1, 1)  # factors of 2 gradients: b to a
  %from_a: f32[B, 90] {dp=S(0)} = aten.neg(%from_b)
  %wait_4: f32[B, 360] {dp=R} = wait(%all_gather_4)
  %slice_tensor: f32[B, 90] {dp=R} = aten.slice.Tensor(%wait_4, 1, 0, 90)
  %slice_tensor_1: f32[B, 90] {dp=R} = aten.slice.Tensor(%wait_4, 1, 90, 180)
  %slice_tensor_2: f32[B, 90] {dp=R} = aten.slice.Tensor(%wait_4, 1, 180, 270)
  %slice_tensor_3: f32[B, 90] {dp=R} = aten.slice.Tensor(%wait_4, 1, 270, 360)
  %t_default_2: f32[90, B] {dp=R} = aten.t(%slice_tensor)
  %mm_default: f32[90, 90] {dp=R} = aten.mm(%t_default_2, %slice_tensor_1)
  %t_default_3: f32[90, B] {dp=R} = aten.t(%slice_tensor_2)
  %mm_default_1: f32[90, 90] {dp=R} = aten.mm(%t_default_3, %slice_tensor_3)
  return gradient param(b)=%mm_default, gradient param(a)=%mm_default_1, output 0=%from_a
""",
    )


def test_a_bucket_is_as_large_as_the_link_asks_for() -> None:
    for gbit, buckets in ((1.0, 4), (100.0, 1)):
        g = Layers()
        for name in "hgfedcba":
            g.layer(name)
        process_mesh = replace(SLOW, link=LinkCost.of_speed(gbit))
        gm = bucketed(g.explicit(), 300, process_mesh)
        assert len(starts(gm)) == buckets, starts(gm)
        assert starts(gm)[0].startswith("factors of ")


def test_of_a_batch_that_is_not_first_the_dim_comes_first() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[2, B, 90]", S(1))
    back = g.add(Input(1, "back"), "f32[B, 2, 90]", S(0))
    flat = g.call(aten.view.default, back, [-1, 90], type="f32[B*2, 90]", at=S(0), reads=(S(0),), name="flat")
    turned = g.call(
        aten.permute.default, x, [1, 0, 2], type="f32[B, 2, 90]", at=S(0), reads=(S(1),), name="turned"
    )
    given = {"type": "f32[B*2, 90]", "at": S(0), "reads": (S(0),)}
    rows = g.call(aten.view.default, turned, [-1, 90], name="rows", **given)
    t = g.call(aten.t.default, flat, type="f32[90, B*2]", at=S(1), reads=(S(0),), name="t")
    made = g.call(
        aten.mm.default, t, rows, type="f32[90, 90]", at=P, reads=(S(1), S(0)), name="made", backward=True
    )
    gm = GatherSufficientFactors(4).run(g.returns({Gradient(Parameter("w")): made}, (R,)), SLOW)
    assert_expected_inline(
        text(bucketed(InsertCollectives().run(gm, SLOW))),
        """\
mesh(dp=2)
  %x: f32[2, B, 90] {dp=S(1)} = input(x)
  %back: f32[B, 2, 90] {dp=S(0)} = input(back)
  %reshape_default: f32[B, 180] {dp=S(0)} = aten.reshape(%back, [-1, 180])
  %permute_default: f32[B, 2, 90] {dp=S(0)} = aten.permute(%x, [1, 0, 2])
  %reshape_default_1: f32[B, 180] {dp=S(0)} = aten.reshape(%permute_default, [-1, 180])
  %cat_default: f32[B, 360] {dp=S(0)} = aten.cat([%reshape_default, %reshape_default_1], 1)
  %all_gather_2: f32[B, 360] {dp=R} = all_gather(%cat_default, 0, 1, 1)  # factors of gradient of w
  %wait_2: f32[B, 360] {dp=R} = wait(%all_gather_2)
  %slice_tensor: f32[B, 180] {dp=R} = aten.slice.Tensor(%wait_2, 1, 0, 180)
  %reshape_default_2: f32[B, 2, 90] {dp=R} = aten.reshape(%slice_tensor, [-1, 2, 90])
  %slice_tensor_1: f32[B, 180] {dp=R} = aten.slice.Tensor(%wait_2, 1, 180, 360)
  %reshape_default_3: f32[B, 2, 90] {dp=R} = aten.reshape(%slice_tensor_1, [-1, 2, 90])
  %permute_default_1: f32[2, B, 90] {dp=R} = aten.permute(%reshape_default_3, [1, 0, 2])
  %flat_1: f32[2*B, 90] {dp=R} = aten.view(%reshape_default_2, [-1, 90])
  %t_1: f32[90, 2*B] {dp=R} = aten.t(%flat_1)
  %turned_1: f32[B, 2, 90] {dp=R} = aten.permute(%permute_default_1, [1, 0, 2])
  %rows_1: f32[2*B, 90] {dp=R} = aten.view(%turned_1, [-1, 90])
  %made: f32[90, 90] {dp=R} = aten.mm(%t_1, %rows_1)
  return gradient param(w)=%made
""",
    )


def test_dtypes_travel_apart() -> None:
    g = Sketch()
    ids = g.add(Input(0, "ids"), "i64[B]", S(0))
    back = g.add(Input(1, "back"), "f32[B, 16]", S(0))
    made = g.call(
        aten.embedding_dense_backward.default, back, ids, 50, -1, False,
        type="f32[50, 16]", at=P, reads=(S(0), S(0)), name="made", backward=True,
    )  # fmt: skip
    gm = GatherSufficientFactors(8).run(g.returns({Gradient(Parameter("rows")): made}, (R,)), SLOW)
    assert_expected_inline(
        text(bucketed(InsertCollectives().run(gm, SLOW))),
        """\
mesh(dp=2)
  %ids: i64[B] {dp=S(0)} = input(ids)
  %back: f32[B, 16] {dp=S(0)} = input(back)
  %reshape_default: i64[B, 1] {dp=S(0)} = aten.reshape(%ids, [-1, 1])
  %all_gather_3: i64[B, 1] {dp=R} = all_gather(%reshape_default, 0, 1, 1)  # factor of gradient of rows
  %all_gather_2: f32[B, 16] {dp=R} = all_gather(%back, 0, 1, 1)  # factor of gradient of rows
  %wait_2: f32[B, 16] {dp=R} = wait(%all_gather_2)
  %slice_tensor: f32[B, 16] {dp=R} = aten.slice.Tensor(%wait_2, 1, 0, 16)
  %wait_3: i64[B, 1] {dp=R} = wait(%all_gather_3)
  %slice_tensor_1: i64[B, 1] {dp=R} = aten.slice.Tensor(%wait_3, 1, 0, 1)
  %reshape_default_1: i64[B] {dp=R} = aten.reshape(%slice_tensor_1, [-1])
  %made: f32[50, 16] {dp=R} = aten.embedding_dense_backward(%slice_tensor, %reshape_default_1, 50, -1, False)
  return gradient param(rows)=%made
""",
    )


def test_a_gather_for_anything_else_stays_as_it_is() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 4]", S(0))
    full = g.call(aten.sort.default, x, 0, type="(f32[B, 4], i64[B, 4])", at=(R, R), reads=(R,))
    first = g.call(torch.ops.aten.neg.default, x, type="f32[B, 4]", at=S(0), reads=(S(0),))
    taken = g.call(operator.getitem, full, 0, type="f32[B, 4]", at=R, reads=())
    gm = g.returns({Output(0): first, Gradient(Parameter("w")): taken}, (S(0), R))
    InsertCollectives().run(gm, SLOW)
    before = text(gm)
    assert text(bucketed(gm)) == before
