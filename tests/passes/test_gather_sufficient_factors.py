from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Gradient, Input, Output, Parameter
from fxdp.ir.network.link_cost import LinkCost
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import P, R, S
from fxdp.passes.gather_sufficient_factors import GatherSufficientFactors
from fxdp.passes.insert_collectives import InsertCollectives
from tests.graphs import Sketch, after, mesh

aten = torch.ops.aten

SLOW = LinkCost.of_speed(0.01)


def process_mesh(link: LinkCost | None = SLOW, **more: Any) -> Mesh:
    return replace(mesh(), link=link, **more)


class Layer(Sketch):
    """The backward of a linear layer of 300 x 200, with its bias."""

    def __init__(self, dtype: str = "f32") -> None:
        super().__init__()
        self.x = self.add(Input(0, "x"), f"{dtype}[B, 200]", S(0))
        self.back = self.add(Input(1, "back"), f"{dtype}[B, 300]", S(0))
        self.t = self.call(
            aten.t.default, self.back, type=f"{dtype}[300, B]", at=S(1), reads=(S(0),), backward=True
        )
        self.mm = self.call(
            aten.mm.default, self.t, self.x, type=f"{dtype}[300, 200]", at=P, reads=(S(1), S(0)),
            backward=True,
        )  # fmt: skip
        self.sum = self.call(
            aten.sum.dim_IntList, self.back, [0], type=f"{dtype}[300]", at=P, reads=(S(0),), backward=True
        )

    def returned(self, **results: torch.fx.Node) -> torch.fx.GraphModule:
        made = {Gradient(Parameter(name)): value for name, value in results.items()}
        return self.returns(made, (R,) * len(made))


def gathered(
    gm: torch.fx.GraphModule, process_mesh: Mesh, batch: int = 8, *, sharded: bool = False
) -> list[str]:
    """What of the graph runs replicated afterwards."""
    GatherSufficientFactors(batch, sharded).run(gm, process_mesh)
    return [n.name for n in gm.graph.nodes if n.op == "call_function" and meta(n).placement == R]


def test_a_layer_s_factors_are_gathered_for_its_weight_and_serve_its_bias_too() -> None:
    g = Layer()
    gm = GatherSufficientFactors(8).run(g.returned(weight=g.mm, bias=g.sum), process_mesh())
    assert_expected_inline(
        after(InsertCollectives(), gm),
        """\
mesh(dp=2)
  %x: f32[B, 200] {dp=S(0)} = input(x)
  %back: f32[B, 300] {dp=S(0)} = input(back)
  %all_gather_1: f32[B, 200] {dp=R} = all_gather(%x, 0, 1, 1)  # factor of gradient of weight
  %all_gather: f32[B, 300] {dp=R} = all_gather(%back, 0, 1, 1)  # factor of gradient of weight
  %t_default: f32[300, B] {dp=S(1)} = aten.t(%back)
  %wait: f32[B, 300] {dp=R} = wait(%all_gather)
  %t_default_1: f32[300, B] {dp=R} = aten.t(%wait)
  %wait_1: f32[B, 200] {dp=R} = wait(%all_gather_1)
  %mm_default: f32[300, 200] {dp=R} = aten.mm(%t_default_1, %wait_1)
  %sum_dim_int_list: f32[300] {dp=R} = aten.sum.dim_IntList(%wait, [0])
  return gradient param(weight)=%mm_default, gradient param(bias)=%sum_dim_int_list
""",
    )


def test_a_bias_alone_is_summed() -> None:
    g = Layer()
    assert gathered(g.returned(bias=g.sum), process_mesh()) == []


def test_of_many_samples_the_gradient_is_less_to_send() -> None:
    for batch, full in ((8, ["mm_default"]), (64, ["mm_default"]), (200, []), (10_000, [])):
        g = Layer()
        assert gathered(g.returned(weight=g.mm), process_mesh(), batch) == full


def test_a_sum_that_is_dealt_out_is_half_as_dear() -> None:
    for batch, full in ((50, ["mm_default"]), (100, [])):
        g = Layer()
        assert gathered(g.returned(weight=g.mm), process_mesh(), batch, sharded=True) == full
    g = Layer()
    assert gathered(g.returned(weight=g.mm), process_mesh(), 100) == ["mm_default"]


def test_over_a_quick_link_work_for_all_samples_would_take_longer() -> None:
    for gbit, full in ((1.0, ["mm_default"]), (400.0, [])):
        g = Layer()
        assert gathered(g.returned(weight=g.mm), process_mesh(LinkCost.of_speed(gbit))) == full


def test_in_a_dtype_without_quick_products_it_takes_longer_sooner() -> None:
    for dtype, full in (("f32", ["mm_default"]), ("bf16", [])):
        g = Layer(dtype)
        assert gathered(g.returned(weight=g.mm), process_mesh(LinkCost.of_speed(5.0)), 32) == full


@pytest.mark.parametrize(
    "mesh",
    [process_mesh(None), process_mesh(alike=False), replace(process_mesh(), sizes=(1,))],
    ids=["memory", "unlike", "one"],
)
def test_without_a_link_or_with_other_processors_gradients_are_summed(mesh: Mesh) -> None:
    g = Layer()
    assert gathered(g.returned(weight=g.mm), mesh) == []


def test_what_shows_or_casts_a_gradient_does_so_whole() -> None:
    g = Layer()
    turned = g.call(aten.t.default, g.mm, type="f32[200, 300]", at=P, reads=(P,), name="turned")
    wide = g.call(aten._to_copy.default, turned, type="f64[200, 300]", at=P, reads=(P,), name="wide")
    assert gathered(g.returned(weight=wide), process_mesh()) == ["mm_default", "turned", "wide"]


def test_a_gradient_that_something_else_reads_is_summed() -> None:
    g = Layer()
    norm = g.call(aten.neg.default, g.mm, type="f32[300, 200]", at=P, reads=(P,))
    gm = g.returns({Gradient(Parameter("weight")): g.mm, Output(0): norm}, (R, R))
    assert gathered(gm, process_mesh()) == []


def test_a_sum_of_two_gradients_is_summed() -> None:
    g = Layer()
    both = g.call(aten.add.Tensor, g.mm, g.mm, type="f32[300, 200]", at=P, reads=(P, P))
    assert gathered(g.returned(weight=both), process_mesh()) == []


def test_an_input_s_gradient_stays_where_it_is() -> None:
    g = Layer()
    gm = g.returns({Gradient(Input(0, "x")): g.mm}, (R,))
    assert gathered(gm, process_mesh()) == []


def test_an_embedding_s_gradient_is_made_of_rows_and_their_ids() -> None:
    g = Sketch()
    ids = g.add(Input(0, "ids"), "i64[B, 3]", S(0))
    back = g.add(Input(1, "back"), "f32[B, 3, 16]", S(0))
    made = g.call(
        aten.embedding_dense_backward.default, back, ids, 5000, -1, False,
        type="f32[5000, 16]", at=P, reads=(S(0), S(0)), name="made", backward=True,
    )  # fmt: skip
    gm = GatherSufficientFactors(8).run(g.returns({Gradient(Parameter("rows")): made}, (R,)), process_mesh())
    assert_expected_inline(
        after(InsertCollectives(), gm),
        """\
mesh(dp=2)
  %ids: i64[B, 3] {dp=S(0)} = input(ids)
  %back: f32[B, 3, 16] {dp=S(0)} = input(back)
  %all_gather_1: i64[B, 3] {dp=R} = all_gather(%ids, 0, 1, 1)  # factor of gradient of rows
  %all_gather: f32[B, 3, 16] {dp=R} = all_gather(%back, 0, 1, 1)  # factor of gradient of rows
  %wait: f32[B, 3, 16] {dp=R} = wait(%all_gather)
  %wait_1: i64[B, 3] {dp=R} = wait(%all_gather_1)
  %made: f32[5000, 16] {dp=R} = aten.embedding_dense_backward(%wait, %wait_1, 5000, -1, False)
  return gradient param(rows)=%made
""",
    )
