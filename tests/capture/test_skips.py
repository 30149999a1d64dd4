"""Skips in captured graphs: exact, named, and every fault of a model in one error."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxdp.capture.captured import Captured
from fxdp.capture.export.skip_marks import MARK, SkipPoint, label_of, route_skips
from fxdp.errors import CaptureError
from fxdp.ir.graph.graph_text import graph_text
from fxdp.ir.graph.metadata import Location, meta
from fxdp.skip import Namespace, current_skip_tracker, pop, skippable, stash
from tests.capturing import capture

from .oracle import check
from .unet import UNet, unet_inputs


def labels(captured: Captured) -> dict[str, str]:
    """The nodes that carry skips."""
    return {node.name: meta(node).skip for node in captured.gm.graph.nodes if meta(node).skip}


def layer(
    forward: Callable[..., Any], stashes: tuple[str, ...] = (), pops: tuple[str, ...] = (), size: int = 4
) -> nn.Module:
    """A skippable with a linear layer `fc` and this forward."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, size)

    Layer.forward = forward  # type: ignore[method-assign]
    return skippable(stash=stashes, pop=pops)(Layer)()


def give(self: Any, x: Tensor) -> Generator[stash, None, Tensor]:
    h = self.fc(x).relu()
    yield stash("a", h)
    return h.sin()


def take(self: Any, x: Tensor) -> Generator[pop, Tensor, Tensor]:
    a = yield pop("a")
    return self.fc(x) + a


def test_names_and_routes_of_a_unet_are_the_same_in_every_capture() -> None:
    captured = capture(UNet(), (), unet_inputs(3))
    assert [(r.key, r.stash.module, r.pop.module) for r in captured.routes] == [
        ("long@1", "net.0", "net.6"),
        ("long", "net.1", "net.5"),
        ("long@2", "net.2", "net.4"),
    ]
    route = captured.routes[0]
    assert (route.namespace, route.name) == (1, "long")
    assert route.stash.file.endswith("unet.py")
    assert route.stash.code == 'yield stash("long", x)'
    assert route.pop.code == 'long = yield pop("long")'
    assert labels(captured) == {"relu": "long@1", "relu_1": "long", "relu_2": "long@2"}
    assert "= aten.relu(%getitem)  # skip long@1" in graph_text(captured.gm)
    assert not captured.static
    again = capture(UNet(), (), unet_inputs(2))
    assert str(again.gm.graph) == str(captured.gm.graph)
    assert again.routes == captured.routes


def test_no_node_is_left_of_the_marks() -> None:
    class Plain(nn.Module):
        def __init__(self, net: nn.Sequential) -> None:
            super().__init__()
            self.a, self.b = net[0].module.fc, net[1].module.fc

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).relu()
            return self.b(h.sin()) + h

    net = nn.Sequential(layer(give, ("a",)), layer(take, (), ("a",)))
    args = (torch.randn(3, 4),)
    marked, plain = (capture(module, args, {}).gm.graph for module in (net, Plain(net)))
    assert [node.target for node in marked.nodes if node.op == "call_function"] == [
        node.target for node in plain.nodes if node.op == "call_function"
    ]


def test_inference() -> None:
    with torch.no_grad():
        captured = check(UNet(), (), unet_inputs(3))
    assert len(labels(captured)) == len(captured.routes) == 3


def stashing(value: Callable[[Any, Tensor, Tensor], Any]) -> nn.Module:
    """Stashes what `value(self, x, h)` makes of its input and its hidden tensor."""

    def forward(self: Any, x: Tensor) -> Generator[stash, None, Tensor]:
        h = self.fc(x).tanh()
        yield stash("a", value(self, x, h))
        return h.sin()

    return layer(forward, ("a",))


VALUES: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], dict[str, str]]] = {
    "the input": (lambda self, x, h: x, {"input_1": "a"}),
    "a parameter": (lambda self, x, h: self.fc.bias, {"_0_module_fc_bias": "a"}),
    "integers": (lambda self, x, h: (x > 0).long(), {"_to_copy": "a"}),
    "detached": (lambda self, x, h: h.exp().detach(), {"detach_1": "a"}),
    "the second result of an op": (lambda self, x, h: torch.sort(h, 1)[0], {"getitem": "a"}),
    "a view": (lambda self, x, h: h.unsqueeze(1)[:, 0], {"select": "a"}),
    "from the batch's size": (lambda self, x, h: torch.arange(x.shape[0])[:, None] * 1.5, {"mul": "a"}),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values(kind: str) -> None:
    value, label = VALUES[kind]
    net = nn.Sequential(stashing(value), nn.Linear(4, 4), layer(take, (), ("a",)))
    captured = check(net, (torch.randn(3, 4),), {}, ((torch.randn(5, 4),), {}))
    assert labels(captured) == label
    assert [route.key for route in captured.routes] == ["a"]


@pytest.mark.parametrize("value", [None, 3])
def test_none_and_numbers_have_no_route(value: Any) -> None:
    def forward(self: Any, x: Tensor) -> Generator[pop, Any, Tensor]:
        a = yield pop("a")
        return self.fc(x) if a is None else self.fc(x) * a

    net = nn.Sequential(stashing(lambda self, x, h: value), layer(forward, (), ("a",)))
    captured = check(net, (torch.randn(3, 4),))
    assert captured.routes == ()


def test_a_popped_tensor_that_nobody_uses() -> None:
    def forward(self: Any, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        yield pop("a")
        return self.fc(x)

    captured = check(nn.Sequential(layer(give, ("a",)), layer(forward, (), ("a",))), (torch.randn(3, 4),))
    assert [route.key for route in captured.routes] == ["a"]


def test_changes_in_place_reach_the_other_end() -> None:
    def forward(self: Any, x: Tensor) -> Generator[Any, Any, Tensor]:
        h = self.fc(x)
        yield stash("a", h)
        h.mul_(3)
        return h + 1

    def back(self: Any, x: Tensor) -> Generator[Any, Any, Tensor]:
        a = yield pop("a")
        a.add_(x)
        return a * x

    check(nn.Sequential(layer(forward, ("a",)), layer(back, (), ("a",))), (torch.randn(3, 4),))


def test_a_command_of_a_helper_has_the_helpers_line() -> None:
    def helper(x: Tensor) -> Generator[stash, None, None]:
        yield stash("a", x.cos())

    def forward(self: Any, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield from helper(x)
        return self.fc(x)

    net = nn.Sequential(layer(forward, ("a",)), layer(take, (), ("a",)))
    (route,) = capture(net, (torch.randn(3, 4),), {}).routes
    assert route.stash.code == 'yield stash("a", x.cos())'


def test_a_buffer_that_changes_after_its_stash() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
            yield stash("a", self.steps)
            self.steps.add_(1)
            return x * 2

    counting = skippable(stash=["a"])(Counting)()
    captured = check(nn.Sequential(counting, layer(take, (), ("a",))), (torch.randn(3, 4),))
    assert [route.key for route in captured.routes] == ["a"]


def test_one_tensor_under_two_names_and_handed_on() -> None:
    def both(self: Any, x: Tensor) -> Generator[Any, Any, Tensor]:
        h = self.fc(x).relu()
        yield stash("a", h)
        yield stash("b", h)
        return h.sin()

    def relay(self: Any, x: Tensor) -> Generator[Any, Any, Tensor]:
        b = yield pop("b")
        yield stash("c", b)
        return x + 1

    def last(self: Any, x: Tensor) -> Generator[Any, Any, Tensor]:
        c = yield pop("c")
        a = yield pop("a")
        return a * c + x

    net = nn.Sequential(
        layer(both, ("a", "b")), layer(relay, ("c",), ("b",)), nn.Sequential(layer(last, (), ("a", "c")))
    )
    captured = check(net, (torch.randn(3, 4),))
    assert labels(captured) == {"relu": "a, b, c"}
    assert [(route.key, route.pop.module) for route in captured.routes] == [
        ("a", "2.0"),
        ("b", "1"),
        ("c", "2.0"),
    ]


def test_a_module_that_runs_twice() -> None:
    give_a, take_a = layer(give, ("a",)), layer(take, (), ("a",))
    captured = check(nn.Sequential(give_a, take_a, give_a, take_a), (torch.randn(3, 4),))
    assert [route.key for route in captured.routes] == ["a", "a"]


def test_static_fallback() -> None:
    def forward(self: Any, x: Tensor) -> Generator[Any, Any, Tensor]:
        a = yield pop("a")
        return (self.fc(x) + a) / int(x.shape[0])

    net = nn.Sequential(layer(give, ("a",)), layer(forward, (), ("a",)))
    captured = check(net, (torch.randn(4, 4),), {}, ((torch.randn(3, 4),), {}))
    assert captured.static
    assert [route.key for route in captured.routes] == ["a"]
    assert labels(captured) == {"relu": "a"}


def wrong(*layers: nn.Module) -> list[str]:
    """The bullets of the refusal; sites without their file's folder."""
    with pytest.raises(CaptureError) as caught:
        capture(nn.Sequential(*layers), (torch.randn(3, 4),), {})
    head, *bullets, remedy = str(caught.value).splitlines()
    assert head == "the model's skip connections do not match:"
    assert "fxdp.skip.verify_skippables" in remedy
    return [re.sub(r"/\S*/(\w+\.py):\d+", r"\1", bullet.removeprefix("  * ")) for bullet in bullets]


def commands(*yielded: Any, stashes: tuple[str, ...] = (), pops: tuple[str, ...] = ()) -> nn.Module:
    """Yields these commands; a name alone stashes."""

    def forward(self: Any, x: Tensor) -> Generator[Any, Any, Tensor]:
        for one in yielded:
            yield stash(one, x) if isinstance(one, str) else one
        return x

    return layer(forward, stashes, pops)


LINE = "test_skips.py `yield stash(one, x) if isinstance(one, str) else one`"
BEGIN = "test_skips.py `def forward(self: Any, x: Tensor) -> Generator[Any, Any, Tensor]:`"


def test_all_faults_of_a_forward_at_once() -> None:
    found = wrong(
        commands("a", "a", "b", "u", stashes=("a", "b", "n")),
        commands(pop("a"), pop("a"), pop("u"), pops=("a", "o")),
        commands("b", stashes=("b",)),
    )
    assert found == [
        f"{LINE} in 0: 'a' has already been stashed",
        f"{LINE} in 0: 'u' has not been declared as stashable",
        f"{BEGIN} in 0: 'n' must be stashed but have not",
        f"{LINE} in 1: 'a' has already been popped",
        f"{LINE} in 1: 'u' has not been declared as poppable",
        f"{BEGIN} in 1: 'o' must be popped but have not",
        f"{LINE} in 2: 'b' is stashed again before it was popped (by 0)",
        f"{LINE} in 2: 'b' is stashed but never popped",
    ]


def test_where_the_forward_cannot_go_on_the_rest_is_read_from_the_declarations() -> None:
    ns = Namespace()
    found = wrong(
        commands("a", stashes=("a",)).isolate(ns),
        commands(pop("a"), pops=("a",)),
        commands(pop("z"), pops=("z",)),
        commands("y", stashes=("y",)),
    )
    assert found == [
        f"{LINE} in 1: 'a' has not been stashed",
        "'2' declared 'z' as poppable but it was not stashed",
        "no module declared 'y' as poppable but stashed",
    ]


def test_popped_before_it_is_stashed() -> None:
    found = wrong(commands(pop("a"), pops=("a",)), commands("a", stashes=("a",)))
    assert found == [f"{LINE} in 0: 'a' has not been stashed"]


def test_faults_explain_an_error_that_follows_from_them() -> None:
    def fails(self: Any, x: Tensor) -> Generator[Any, Any, Tensor]:
        a = yield pop("a")
        return x + a.missing

    found = wrong(commands("a", "u", stashes=("a",)), layer(fails, (), ("a",)))
    assert found == [f"{LINE} in 0: 'u' has not been declared as stashable"]


def test_each_capture_begins_with_nothing_stashed() -> None:
    net = nn.Sequential(layer(give, ("a",)), nn.Linear(3, 3), layer(take, (), ("a",)))
    for _ in range(2):
        with pytest.raises(CaptureError, match="the model itself fails on these inputs"):
            capture(net, (torch.randn(3, 4),), {})
    assert not current_skip_tracker().tensors
    net[1] = nn.Identity()
    assert len(capture(net, (torch.randn(3, 4),), {}).routes) == 1


def marked(*points: str) -> tuple[fx.GraphModule, list[SkipPoint]]:
    """A forward graph with these marks, one reading the other."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    found = []
    for i, point in enumerate(points):
        value = graph.call_function(MARK, (value, point))
        kind, name = point.split()
        found.append(SkipPoint(kind, None, name, Location("net.py", i + 1)))
    graph.output((graph.call_function(torch.ops.aten.sin.default, (value,)),))
    return fx.GraphModule({}, graph), found


def test_the_pass_turns_marks_into_routes() -> None:
    gm, points = marked("stash a", "stash b", "pop a", "pop b")
    routes = route_skips(gm, points)
    assert [(r.key, r.stash.line, r.pop.line) for r in routes] == [("a", 1, 3), ("b", 2, 4)]
    aliases = [node for node in gm.graph.nodes if label_of(node)]
    assert [label_of(node) for node in aliases] == ["a", "b"]
    assert [node.name for node in gm.graph.nodes] == [
        "x",
        "alias_default",
        "alias_default_1",
        "sin_default",
        "output",
    ]
    gm.graph.lint()


def test_the_pass_reports_all_faults() -> None:
    gm, points = marked("pop x", "stash a", "stash a", "pop a", "pop a", "stash b")
    with pytest.raises(CaptureError) as caught:
        route_skips(gm, points)
    assert str(caught.value).splitlines()[1:-1] == [
        "  * net.py:1: 'x' is popped but not stashed before",
        "  * net.py:3: 'a' is stashed again before it was popped",
        "  * net.py:5: 'a' is popped but not stashed before",
        "  * net.py:6: 'b' is stashed but never popped",
    ]


def test_marks_by_hand_are_refused() -> None:
    class ByHand(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.fxdp.mark(x, "stash a")

    with pytest.raises(CaptureError, match=r"torch\.ops\.fxdp\.mark called by hand"):
        capture(ByHand(), (torch.randn(3, 4),), {})
