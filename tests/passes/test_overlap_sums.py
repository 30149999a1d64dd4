from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import Cause, Location, meta
from fxdp.ir.graph.signature import Gradient, Input, OutputSpec, Parameter
from fxdp.ir.network.link_cost import LinkCost
from fxdp.ir.types.placements import P, Placement, R, S
from fxdp.passes.bucket_gradients import BucketGradients
from fxdp.passes.overlap_sums import OverlapSums
from tests.graphs import Sketch, after, mesh, text

aten = torch.ops.aten

_IMAGES, _WEIGHT, _NAMES = "f32[B, 4, 8, 8]", "f32[4, 4, 3, 3]", "abc"


class Backward(Sketch):
    """Convolutions backwards, with a sum over the batch between them, as BatchNorm makes it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.grad = self.add(Input(0, "grad"), _IMAGES, S(0))
        self.images = [self.add(Input(i + 1, f"x{i}"), _IMAGES, S(0)) for i in range(count)]
        self.weights = [self.add(Parameter(f"w{i}"), _WEIGHT, R) for i in range(count)]
        self.results: dict[OutputSpec, fx.Node] = {}

    def convolution(self, i: int, mask: tuple[bool, bool, bool] = (True, True, False)) -> None:
        both = self.call(
            aten.convolution_backward.default, self.grad, self.images[i], self.weights[i],
            [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [*mask],
            type=f"({_IMAGES}, {_WEIGHT}, f32[4])", at=(S(0), P, P), reads=(S(0), S(0), R),
            name=f"back_{_NAMES[i]}", backward=True,
        )  # fmt: skip
        if mask[0]:
            self.grad = self._item(both, 0, _IMAGES, S(0))
        weight = self.summed(self._item(both, 1, _WEIGHT, P), _WEIGHT, f"sum_{_NAMES[i]}")
        self.results[Gradient(Parameter(f"w{i}"))] = weight

    def norm(self) -> None:
        """A sum over batch and pixels, which all of them need."""
        own = self._add(aten.sum.dim_IntList, self.grad, [0, 2, 3], True, type_="f32[1, 4, 1, 1]", at=P)
        full = self.summed(own, "f32[1, 4, 1, 1]", "norm")
        self.grad = self.call(
            aten.sub.Tensor, self.grad, full, type=_IMAGES, at=S(0), reads=(S(0), R), backward=True
        )

    def summed(self, value: fx.Node, type_: str, name: str) -> fx.Node:
        cause = Cause("output", value.name, Location(), f"gradient of {name}")
        pending = self.call(
            redistributions.all_reduce, value, "sum", type=type_, at=R, reads=(P,), name=name, cause=cause,
            backward=True,
        )  # fmt: skip
        wait = redistributions.wait
        return self.call(wait, pending, type=type_, at=R, reads=(R,), name=f"{name}_done", backward=True)

    def done(self, **more: fx.Node) -> fx.GraphModule:
        """The graph; what is returned beside gradients of parameters is an input's."""
        for done in self.results.values():  # as insert-collectives leaves them: before what reads them
            self.graph._root.prepend(done)
        given: dict[OutputSpec, fx.Node] = {Gradient(Input(0, name)): value for name, value in more.items()}
        return self.returns({**self.results, **given}, (*[R] * len(self.results), *[S(0)] * len(given)))

    def _item(self, both: fx.Node, i: int, type_: str, at: Placement) -> fx.Node:
        return self.call(operator.getitem, both, i, type=type_, at=at, backward=True)

    def _add(self, target: object, *args: object, type_: str, at: Placement) -> fx.Node:
        return self.call(target, *args, type=type_, at=at, reads=(S(0),), backward=True)


def order(gm: fx.GraphModule) -> list[str]:
    """What computes and travels, in order."""
    known = ("back_", "norm", "sum_", "all_reduce", "wait", "mm")
    return [n.name for n in gm.graph.nodes if n.name.startswith(known) and "sum_dim" not in n.name]


def test_the_gradient_of_a_weight_is_computed_while_the_next_layer_s_sum_travels() -> None:
    g = Backward(2)
    g.convolution(1)
    g.norm()
    g.convolution(0, (False, True, False))
    gm = OverlapSums().run(g.done(), mesh())
    gm.graph.lint()
    assert order(gm) == [
        "back_b", "norm", "back_b_1", "sum_b", "norm_done", "back_a", "sum_a", "sum_b_done", "sum_a_done",
    ]  # fmt: skip
    backs = [n for n in gm.graph.nodes if n.name.startswith("back")]
    made = {n.name: [t is not None for t in meta(n).types] for n in backs}
    assert made == {"back_b": [True, False, False], "back_b_1": [False, True, False], "back_a": [True] * 3}
    assert [meta(n).placement for n in gm.graph.nodes if n.name == "back_b_1"] == [(None, P, None)]


def test_each_sum_hides_behind_the_layer_before_it() -> None:
    g = Backward(3)
    for i in (2, 1, 0):
        g.convolution(i, (i > 0, True, False))
        if i:
            g.norm()
    assert order(OverlapSums().run(g.done(), mesh())) == [
        "back_c", "norm", "back_c_1", "sum_c", "norm_done",
        "back_b", "norm_1", "back_b_1", "sum_b", "norm_done_1",
        "back_a", "sum_a", "sum_c_done", "sum_b_done", "sum_a_done",
    ]  # fmt: skip


def test_a_bucket_starts_after_the_sum_that_its_gradient_hides() -> None:
    g = Backward(2)
    g.convolution(1)
    g.norm()
    g.convolution(0, (False, True, False))
    one = 4 * 4 * 3 * 3 * 4
    slow = replace(mesh(), link=LinkCost.of_speed(1.0))
    gm = BucketGradients(one).run(OverlapSums().run(g.done(), slow), slow)
    assert order(gm)[:4] == ["back_b", "norm", "back_b_1", "norm_done"]


def test_without_a_sum_that_the_backward_waits_for_a_convolution_stays_one_call() -> None:
    g = Backward(2)
    g.convolution(1)
    g.convolution(0)
    gm = g.done()
    before = text(gm)
    assert after(OverlapSums(), gm) == before


def test_what_the_sum_needs_stays_before_it() -> None:
    """A weight's gradient that the backward goes on with is no result alone."""
    g = Backward(1)
    g.convolution(0)
    (weight,) = g.results.values()
    g.grad = g.call(aten.mul.Tensor, g.grad, weight, type=_IMAGES, at=S(0), reads=(S(0), R), backward=True)
    g.norm()
    gm = g.returns(g.results | {Gradient(Input(0, "grad")): g.grad}, (R, S(0)))
    names = order(OverlapSums().run(gm, mesh()))
    assert names.index("sum_a") < names.index("sum_a_done") < names.index("norm")


def test_products_hide_sums_too_and_what_nothing_is_computed_of_is_waited_for_at_the_end() -> None:
    g = Backward(0)
    x = g.add(Input(1, "x"), "f32[B, 4]", S(0))
    grad = g.add(Input(2, "back"), "f32[B, 4]", S(0))
    for name in ("a", "b"):
        t = g.call(aten.t.default, x, type="f32[4, B]", at=S(1), reads=(S(0),), backward=True)
        mm = g.call(
            aten.mm.default, t, grad, type="f32[4, 4]", at=P, reads=(S(1), S(0)), name=f"mm_{name}",
            backward=True,
        )  # fmt: skip
        g.results[Gradient(Parameter(name))] = g.summed(mm, "f32[4, 4]", f"sum_{name}")
        own = g.call(aten.sum.dim_IntList, grad, [0], type="f32[4]", at=P, reads=(S(0),), backward=True)
        full = g.summed(own, "f32[4]", f"norm_{name}")
        grad = g.call(aten.sub.Tensor, grad, full, type="f32[B, 4]", at=S(0), reads=(S(0), R), backward=True)
    assert order(OverlapSums().run(g.done(back=grad), mesh())) == [
        "norm_a", "mm_a", "sum_a", "norm_a_done", "mm_b", "sum_b", "norm_b", "norm_b_done", "sum_a_done",
        "sum_b_done",
    ]  # fmt: skip


def test_one_rank_is_left_alone() -> None:
    g = Backward(1)
    g.convolution(0)
    g.norm()
    gm = g.done(grad=g.grad)
    before = text(gm)
    assert text(OverlapSums().run(gm, mesh(1))) == before
