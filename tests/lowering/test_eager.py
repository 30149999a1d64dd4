from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from fxdp.ir.graph.signature import Buffer, Gradient, Input, Mutation, Output, Parameter, Tangent
from fxdp.ir.types.placements import R, S
from fxdp.lowering.backward import usual_zeros
from fxdp.lowering.eager import lower_eager
from fxdp.lowering.forward_backward_pair import ForwardBackward
from tests.graphs import Sketch, text, type_of

aten = torch.ops.aten


def _scaled(read_old: bool = False) -> fx.GraphModule:
    """`y = w * x * scale` and `scale += 1`; the backward may read the old scale once more."""
    g = Sketch()
    w, scale = g.add(Parameter("w"), "f32[]", R), g.add(Buffer("scale"), "f32[]", R)
    other = g.add(Parameter("unused"), "f32[]", R)
    x, tangent = g.add(Input(0, "x"), "f32[B]", S(0)), g.add(Tangent(0), "f32[B]", S(0))
    assert other.op == "placeholder"
    scaled = g.call(aten.mul.Tensor, x, scale, type="f32[B]", at=S(0), name="scaled")
    y = g.call(aten.mul.Tensor, w, scaled, type="f32[B]", at=S(0), name="y")
    more = g.call(aten.add.Tensor, scale, 1, type="f32[]", at=R, name="more")
    factor = scaled
    if read_old:
        factor = g.call(aten.mul.Tensor, x, scale, type="f32[B]", at=S(0), name="again", backward=True)
    both = g.call(aten.mul.Tensor, factor, tangent, type="f32[B]", at=S(0), name="both", backward=True)
    grad = g.call(aten.sum.default, both, type="f32[]", at=R, name="grad", backward=True)
    return g.returns({Output(0): y, Mutation(Buffer("scale")): more, Gradient(Parameter("w")): grad})


def _shown(gm: fx.GraphModule | None) -> str:
    assert gm is not None
    return text(gm)


def test_the_forward_hands_on_what_the_backward_reads() -> None:
    pair = lower_eager(_scaled())
    assert (pair.outputs, pair.trains) == (1, True)
    assert_expected_inline(
        _shown(pair.forward_graph),
        """\
mesh(dp=2)
  %w: f32[] {dp=R} = param(w)
  %scale: f32[] {dp=R} = buffer(scale)
  %unused: f32[] {dp=R} = param(unused)
  %x: f32[B] {dp=S(0)} = input(x)
  %scaled: f32[B] {dp=S(0)} = aten.mul.Tensor(%x, %scale)
  %y: f32[B] {dp=S(0)} = aten.mul.Tensor(%w, %scaled)
  %more: f32[] {dp=R} = aten.add.Tensor(%scale, 1)
  %copy__default = aten.copy_(%scale, %more)
  return saved=%y, saved=%scaled
""",
    )


def test_the_backward_returns_a_gradient_or_none_per_input() -> None:
    assert_expected_inline(
        _shown(lower_eager(_scaled()).backward_graph),
        """\
mesh(dp=2)
  %scaled: f32[B] {dp=S(0)} = placeholder()
  %tangent: f32[B] {dp=S(0)} = tangent(0)
  %both: f32[B] {dp=S(0)} = aten.mul.Tensor(%scaled, %tangent)
  %grad: f32[] {dp=R} = aten.sum(%both)
  return saved=%grad, saved=None, saved=None, saved=None
""",
    )


def _step(
    pair: ForwardBackward, *inputs: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    results = pair.forward(list(inputs))
    outputs, saved = list(results[: pair.outputs]), results[pair.outputs :]
    backward = pair.backward(frozenset())
    ordered = [saved[i] for i in pair.saved_order]
    return outputs, list(backward.run([*ordered, torch.ones_like(outputs[0])]))


@pytest.mark.parametrize("read_old", [False, True])
def test_the_backward_sees_the_buffer_as_it_was(read_old: bool) -> None:
    scale = torch.tensor(2.0)
    inputs = (torch.tensor(3.0), scale, torch.tensor(0.0), torch.tensor([1.0, 2.0]))
    outputs, gradients = _step(lower_eager(_scaled(read_old)), *inputs)
    assert outputs[0].tolist() == [6.0, 12.0]
    assert scale == 3.0, "the new value is written in place"
    assert [g if g is None else g.item() for g in gradients] == [6.0, None, None, None]


def test_without_gradients_there_is_no_backward() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    pair = lower_eager(g.returns({Output(0): g.call(aten.relu.default, x, type="f32[B]", at=S(0))}))
    assert not pair.trains
    assert pair.forward([torch.tensor([-1.0, 1.0])])[0].tolist() == [0.0, 1.0]


def test_values_are_freed_as_the_forward_runs() -> None:
    pair = lower_eager(_scaled())
    inputs = [torch.tensor(3.0), torch.tensor(2.0), torch.tensor(0.0), torch.ones(2)]
    pair.forward(inputs)
    assert inputs == []


def test_backward_ops_without_a_tangent_wait_for_the_backward() -> None:
    """A mask that only the backward reads is not computed by a forward that may have none."""
    pair = lower_eager(_scaled(read_old=True))
    assert "again" not in [n.name for n in pair.forward_graph.graph.nodes]
    assert pair.backward_graph is not None
    assert "again" in [n.name for n in pair.backward_graph.graph.nodes]


def test_the_loss_alone_has_a_tangent_as_a_rule() -> None:
    types = [type_of("f32[]"), type_of("f32[B, 3]")]
    assert usual_zeros(types) == frozenset({1})  # type: ignore[arg-type]
