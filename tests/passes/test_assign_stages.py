from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from fxdp.errors import StageError
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Input, Output, Parameter
from fxdp.ir.types.placements import R, S
from fxdp.passes.assign_stages import AssignStages
from tests.capture.unet import UNet, unet_inputs
from tests.graphs import Sketch, after
from tests.pipeline.cut.cuts import staged

aten = torch.ops.aten


def test_values_of_one_stage_have_its_number() -> None:
    g = Sketch()
    w = g.add(Parameter("w"), "f32[8, 8]", R)
    x = g.add(Input(0, "x"), "f32[B, 8]", S(0))
    first = g.call(aten.mm.default, x, w, type="f32[B, 8]", at=S(0), reads=(S(0), R))
    second = g.call(aten.mm.default, first, w, type="f32[B, 8]", at=S(0), reads=(S(0), R))
    gm = g.returns({Output(0): second})
    assert_expected_inline(
        after(AssignStages(2), gm),
        """\
mesh(dp=2)
  %w: f32[8, 8] {dp=R} = param(w)
  %x: f32[B, 8] {dp=S(0)} = input(x)
  %mm_default: f32[B, 8] {stage=0 dp=S(0)} = aten.mm(%x, %w)
  %mm_default_1: f32[B, 8] {stage=1 dp=S(0)} = aten.mm(%mm_default, %w)
  return output 0=%mm_default_1
""",
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.b(self.a(x).relu()).relu()
        return nn.functional.linear(hidden, self.a.weight).sum()


def test_a_tied_gradient_is_summed_after_the_last_micro_batch() -> None:
    gm = staged(Tied(), torch.randn(4, 4), pipeline={"stages": ("b",), "microbatches": 2})

    late = [n for n in gm.graph.nodes if meta(n).once and n.target is aten.add.Tensor]
    assert len(late) == 1  # the two halves of a.weight's gradient, one from each stage
    assert {meta(a).stage for a in late[0].all_input_nodes} == {0, 1}


def test_more_stages_than_places_to_cut() -> None:
    with pytest.raises(StageError, match="stages=50"):
        staged(Tied(), torch.randn(4, 4), pipeline={"stages": 50})


def test_no_cut_between_an_op_and_its_several_results() -> None:
    gm = staged(UNet(), *unet_inputs(3).values(), pipeline={"stages": 4})
    norms = gm.graph.find_nodes(op="call_function", target=aten.native_group_norm.default)
    assert len(norms) == 3  # beside skips that are open
    for node in norms:
        assert {meta(user).stage for user in node.users} == {meta(node).stage}


def test_unknown_names_have_near_matches() -> None:
    with pytest.raises(StageError, match="'bb'; did you mean 'b'"):
        staged(Tied(), torch.randn(4, 4), pipeline={"stages": ("bb",)})


def test_names_must_be_in_order() -> None:
    with pytest.raises(StageError, match="expected each after the one before"):
        staged(Tied(), torch.randn(4, 4), pipeline={"stages": ("b", "a")})
