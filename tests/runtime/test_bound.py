from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from fxdp.errors import StateError
from fxdp.ir.graph.signature import Buffer, Constant, Gradient, Input, Mutation, Output, Parameter, Tangent
from fxdp.ir.types.placements import R, S
from fxdp.lowering.eager import lower_eager
from fxdp.runtime.bound import BoundProgram
from tests.graphs import Sketch

aten = torch.ops.aten


class Scaled:
    """`y = w * x`, and a buffer that counts calls; `y` is sharded."""

    def __init__(self, world: int = 1, seeded: bool = False) -> None:
        g = Sketch()
        w, count = g.add(Parameter("w"), "f32[]", R), g.add(Buffer("count"), "f32[]", R)
        x = g.add(Input(0, "x"), "f32[B]", S(0))
        tangent = g.add(Tangent(0), "f32[B]", S(0))
        y = g.call(aten.mul.Tensor, w, x, type="f32[B]", at=S(0), reads=(R, S(0)))
        more = g.call(aten.add.Tensor, count, 1, type="f32[]", at=R, reads=(R,))
        both = g.call(aten.mul.Tensor, x, tangent, type="f32[B]", at=S(0), reads=(S(0),) * 2, backward=True)
        grad = g.call(aten.sum.default, both, type="f32[]", at=R, reads=(S(0),), backward=True)
        gm = g.returns(
            {Output(0): y, Output(1): more, Mutation(Buffer("count")): more, Gradient(Parameter("w")): grad}
        )
        self.w, self.count = torch.tensor(3.0, requires_grad=True), torch.tensor(0.0)
        values = {Parameter("w"): self.w, Buffer("count"): self.count}
        self.program = BoundProgram.bind(gm, lower_eager(gm), values, world=world, rank=0, seeded=seeded)

    def __call__(self, *x: float) -> tuple[Tensor, ...]:
        return tuple(self.program.run([torch.tensor(x)], {}, None))


def test_a_step() -> None:
    scaled = Scaled()
    y, more = scaled(1.0, 2.0)
    y.backward(torch.tensor([1.0, 10.0]))
    assert (y.tolist(), scaled.w.grad, scaled.count) == ([3.0, 6.0], torch.tensor(21.0), torch.tensor(1.0))
    assert y.requires_grad
    assert not more.requires_grad, "an output without a tangent is not differentiable"


def test_steps_accumulate_gradients_and_buffers() -> None:
    scaled = Scaled()
    for _ in range(3):
        scaled(1.0)[0].sum().backward()
    assert (scaled.w.grad, scaled.count) == (torch.tensor(3.0), torch.tensor(3.0))


def test_two_calls_before_their_backwards() -> None:
    scaled = Scaled()
    first, second = scaled(1.0)[0], scaled(5.0)[0]
    (first.sum() * 2 + second.sum()).backward()
    assert scaled.w.grad == torch.tensor(7.0)


def test_what_a_backward_reads_must_not_change_before() -> None:
    scaled, x = Scaled(), torch.ones(2)
    (y, _) = scaled.program.run([x], {}, None)
    x.mul_(2)
    with pytest.raises(StateError, match="changed in place after its forward"):
        y.sum().backward()
    y = scaled(1.0)[0].sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_the_model_s_own_tensors_are_read_at_each_call() -> None:
    scaled = Scaled()
    with torch.no_grad():
        scaled.w.fill_(10.0)
    assert scaled(1.0)[0].tolist() == [10.0]


def test_a_loss_outside_is_averaged_over_ranks(caplog: pytest.LogCaptureFixture) -> None:
    scaled = Scaled(world=4)
    with caplog.at_level(logging.WARNING, "fxdp"):
        for _ in range(2):
            scaled(8.0)[0].sum().backward()
    assert scaled.w.grad == torch.tensor(4.0)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1, "it is said once"
    assert "divided by 4" in said[0]


def test_a_loss_outside_of_uneven_parts_is_a_mean_of_means(caplog: pytest.LogCaptureFixture) -> None:
    scaled = Scaled(world=4)
    with caplog.at_level(logging.WARNING, "fxdp"):
        scaled(8.0)[0].sum().backward()
        for _ in range(2):
            scaled.program.run([torch.tensor([8.0])], {}, None, even=False)[0].sum().backward()
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2, "each is said once"
    assert "mean of the ranks' means, as their parts of the batch differ in size" in said[1]
    assert "loss_fn=" in said[1]


def test_strided_inputs_and_tangents() -> None:
    scaled = Scaled()
    (y, _) = scaled.program.run([torch.arange(4.0)[::2]], {}, None)
    y.backward(torch.tensor([1.0]).expand(2))
    assert scaled.w.grad == torch.tensor(2.0)


def test_a_strided_input_that_the_model_changes_is_changed() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    more = g.call(aten.add.Tensor, x, 1, type="f32[B]", at=S(0), reads=(S(0),))
    gm = g.returns({Output(0): more, Mutation(Input(0, "x")): more})
    program = BoundProgram.bind(gm, lower_eager(gm), {}, world=1, rank=0, seeded=False)
    memory = torch.zeros(4)
    for _ in range(2):
        program.run([memory[::2]], {}, None)
    assert memory.tolist() == [2.0, 0.0, 2.0, 0.0]


def test_a_result_that_is_a_view_may_be_changed_in_place() -> None:
    """As the part of several sums that travelled as one: on one device it was a tensor of its own."""
    g = Sketch()
    w, tangent = g.add(Parameter("w"), "f32[2]", R), g.add(Tangent(0), "f32[]", R)
    sums = g.call(aten.mul.Tensor, w, w, type="f32[2]", at=R, reads=(R, R))
    loss = g.call(aten.select.int, sums, 0, 1, type="f32[]", at=R, reads=(R,))
    grad = g.call(aten.mul.Tensor, w, tangent, type="f32[2]", at=R, reads=(R, R), backward=True)
    gm = g.returns({Output(0): loss, Gradient(Parameter("w")): grad})
    weight = torch.ones(2, requires_grad=True)
    program = BoundProgram.bind(gm, lower_eager(gm), {Parameter("w"): weight}, world=1, rank=0, seeded=False)
    (found,) = program.run([], {}, None)
    found /= 4
    found.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.25, 0.25]


def test_a_second_derivative_is_refused() -> None:
    scaled = Scaled()
    (grad,) = torch.autograd.grad(scaled(1.0)[0].sum(), scaled.w, create_graph=True)
    with pytest.raises(RuntimeError, match="a compiled module has first derivatives only"):
        grad.backward()


def test_sizes_and_rows_have_their_places() -> None:
    g = Sketch()
    size, rows = g.size("B"), g.add(Constant("<rows>"), "i64[B]", R)
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    taken = g.call(aten.index_select.default, x, 0, rows, type="f32[B]", at=S(0), reads=(S(0), R))
    y = g.call(aten.div.Tensor, taken, size, type="f32[B]", at=S(0), reads=(S(0),))
    gm = g.returns({Output(0): y})
    program = BoundProgram.bind(gm, lower_eager(gm), {}, world=2, rank=1, seeded=False)
    (result,) = program.run([torch.tensor([1.0, 2.0, 4.0])], {"B": 2}, {"": torch.tensor([2, 0])})
    assert result.tolist() == [2.0, 0.5]


def _noise(rank: int) -> BoundProgram:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    gm = g.returns({Output(0): g.call(aten.rand_like.default, x, type="f32[B]", at=S(0), reads=(None,))})
    return BoundProgram.bind(gm, lower_eager(gm), {}, world=2, rank=rank, seeded=True)


def test_ranks_draw_differently_and_reproducibly() -> None:
    drawn, next_draw = [], []
    for rank in (0, 1, 0):
        torch.manual_seed(7)
        drawn.append(_noise(rank).run([torch.ones(3)], {}, None)[0].tolist())
        next_draw.append(torch.rand(1).item())
    assert drawn[0] == drawn[2] != drawn[1]
    assert len(set(next_draw)) == 1, "the user's generator moves on equally on all ranks"


def test_two_calls_draw_differently() -> None:
    program = _noise(0)
    first, second = (program.run([torch.ones(3)], {}, None)[0].tolist() for _ in range(2))
    assert first != second
