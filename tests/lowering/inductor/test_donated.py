"""A backward writes over what was saved for it alone, and over nothing else."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

import fxdp
from fxdp.lowering.inductor import compile as compiling
from fxdp.lowering.inductor.donated import donated, donated_inputs
from fxdp.startup.regions.compile_by_region import donated_to
from fxdp.startup.regions.compiled_regions import CompiledRegion
from tests.fallbacks import no_fallback
from tests.held_memory import peak_of

aten = torch.ops.aten
_BYTES = 1 << 20


def _halves(
    saved: Callable[[fx.Graph, fx.Node], tuple[list[fx.Node], list[fx.Node]]],
    reads: Callable[[fx.Graph, fx.Node], fx.Node],
) -> frozenset[str]:
    """What may be written over of a forward that gives the first values and saves the second ones."""
    fake, graph, backward = FakeTensorMode(), fx.Graph(), fx.Graph()
    x = graph.placeholder("x")
    given, kept = saved(graph, x)
    graph.output((*given, *kept))
    with fake:
        for node in graph.nodes:
            if node.op != "output":
                node.meta["val"] = torch.empty(4, 4)
    inputs = [backward.placeholder(node.name) for node in dict.fromkeys(kept)]
    backward.output((reads(backward, inputs[0]),))
    owner = nn.Module()
    return donated(fx.GraphModule(owner, graph), fx.GraphModule(owner, backward), len(given))


def _doubled(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return graph.call_function(aten.mul.Tensor, (node, node))


def _call(op: Callable[..., object], *args: object) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    return lambda graph, node: graph.call_function(op, (node, *args))


relu, flat = _call(aten.relu.default), _call(aten.view.default, [16])


def _cat(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return graph.call_function(aten.cat.default, ([node, node],))


def _with(user: Callable[[fx.Graph, fx.Node], fx.Node], visible: bool) -> Callable[..., object]:
    """A saved relu, and what somebody makes of it, which is a result, too."""

    def saved(graph: fx.Graph, x: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        made = relu(graph, x)
        other = user(graph, made)
        return ([other], [made]) if visible else ([], [made, other])

    return saved


FREE = {
    "read by another": _with(_doubled, True),
    "beside another": _with(_doubled, False),
}
HELD = {
    "an input": lambda graph, x: ([], [x]),
    "a result": lambda graph, x: (lambda made: ([made], [made]))(relu(graph, x)),
    "a view of an input": lambda graph, x: ([], [flat(graph, x)]),
    "a view of it is a result": _with(flat, True),
    "a view of it is saved": _with(flat, False),
    "a part of something": _with(lambda graph, made: _cat(graph, made), True),
    "a view of it is a part": _with(lambda graph, made: _cat(graph, flat(graph, made)), True),
    "new values of a buffer": lambda graph, x: (
        lambda made: ([graph.call_function(aten.copy_.default, (x, made))], [made])
    )(relu(graph, x)),
    "of a collective": lambda graph, x: (
        [], [graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,))]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FREE)
def test_what_only_the_backward_holds_is_given_up(name: str) -> None:
    assert "relu_default" in _halves(FREE[name], _doubled)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HELD)
def test_what_others_may_hold_stays(name: str) -> None:
    assert _halves(HELD[name], _doubled) == frozenset()  # type: ignore[arg-type]


@pytest.mark.parametrize("handed_on", [lambda graph, saved: saved, flat])
def test_what_the_backward_gives_stays(handed_on: Callable[[fx.Graph, fx.Node], fx.Node]) -> None:
    assert _halves(FREE["read by another"], handed_on) == frozenset()  # type: ignore[arg-type]


def test_segments_write_over_what_no_later_one_reads() -> None:
    """Those of one kind over the same inputs, and none over what a sum between them may still read."""
    graph = fx.Graph()
    a, b, c, d = map(graph.placeholder, "abcd")

    def region(kind: str, *takes: fx.Node, between: bool = False) -> CompiledRegion:
        return CompiledRegion(fx.Graph(), takes, 0, (), (), kind, between)

    names = frozenset("abcd")
    assert donated_inputs(graph, frozenset("ac")) == (0, 2)
    found = donated_to([region("layer", a, b), region("layer", c, d)], names)
    assert found == {"layer": (0, 1)}
    found = donated_to([region("layer", a, b), region("layer", b, c)], names)
    assert found == {"layer": (0,)}
    found = donated_to([region("sum", b, between=True), region("layer", a, b)], names)
    assert found["layer"] == (0,)


class _Exponentials(nn.Module):
    """Its backward reads what its forward has made of a megabyte each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.scale).exp() @ torch.ones(512, 512)).square().mean()


def _backward_peak() -> tuple[int, Tensor]:
    torch.manual_seed(0)
    model, x = _Exponentials(), torch.randn(512, 512)
    with no_fallback():
        compiled = fxdp.compile(model)
        compiled(x).backward()  # compiles
        model.scale.grad = None
        loss = compiled(x)
    peak = peak_of(lambda: loss.backward())
    assert model.scale.grad is not None
    return peak, model.scale.grad


def test_a_backward_needs_less_memory_and_gives_the_same() -> None:
    peak, gradient = _backward_peak()
    with mock.patch.object(compiling, "donated", return_value=frozenset()):
        other_peak, other = _backward_peak()
    assert torch.equal(gradient, other)
    assert peak < other_peak - 0.9 * _BYTES
