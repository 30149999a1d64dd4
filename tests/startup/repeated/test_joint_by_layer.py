"""Joint graphs of many layers that are made from those of a few equal the ones that are traced full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxdp.capture.captured import Captured
from fxdp.capture.export.exported import export
from fxdp.capture.export.flat_module import FlatModule
from fxdp.capture.inputs import read_inputs
from fxdp.capture.patches.patch_tables import capture_patches
from fxdp.ir.graph.metadata import meta
from fxdp.startup.repeated import joint_by_layer
from fxdp.startup.repeated.alike_layers import OtherLayersError
from fxdp.startup.repeated.reduced import Reduced
from tests.capturing import capture

pytestmark = pytest.mark.usefixtures("float64")

LAYERS = 10


class Residual(nn.Module):
    """Statistics that are written, draws, and what is read across the border of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Stack(nn.Module):
    """Layers between an embedding and a head that share a weight."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(Residual() for _ in range(layers))
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return (h @ self.head.weight).square().mean()


class Sharing(nn.Module):
    """A layer that computes what all read, if it is the first."""

    def __init__(self, bias: nn.Parameter) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.rand(4)), bias

    def forward(self, x: Tensor, shared: Tensor | None) -> tuple[Tensor, Tensor]:
        if shared is None:
            shared = torch.outer(self.bias, self.bias).softmax(-1)
        h = torch.relu(x * self.scale) @ shared
        return F.layer_norm(x + torch.tanh(h) * h.sigmoid(), (4,)), shared


class Biased(nn.Module):
    """A learned bias that the first layer computes and all read."""

    def __init__(self) -> None:
        super().__init__()
        bias = nn.Parameter(torch.rand(4))
        self.layers = nn.ModuleList(Sharing(bias) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        shared = None
        for layer in self.layers:
            x, shared = layer(x, shared)
        return x.logsumexp(-1).sum()


class Scale(nn.Module):
    """A backward that reads no parameters, but what the forward made of them, and of the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.scale)
        return x + torch.tanh(normed @ self.weight.t()) @ self.weight


class Scaled(nn.Module):
    """Layers between a beginning and an end without modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.layers = nn.Sequential(*(Scale() for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x.exp())
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * (1 + self.scale)).sum()


class Outside(Stack):
    """Sums over layers, of which each is computed outside of them."""

    def forward(self, x: Tensor) -> Tensor:
        h, total = self.embed(x), torch.zeros(())
        for layer in self.layers:
            h = layer(h) + h
            total = total + h.square().mean()
        return total


class Frozen(Stack):
    """One layer has no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[4].requires_grad_(False)


class Read(Stack):
    """What a layer in the midst gave is read at the end."""

    def forward(self, x: Tensor) -> Tensor:
        kept, h = [], self.embed(x)
        for layer in self.layers:
            h = layer(h)
            kept.append(h)
        return (kept[3] * h).sum()


class Skipping(Stack):
    """Each layer reads what the two before it gave."""

    def forward(self, x: Tensor) -> Tensor:
        before, h = self.embed(x), self.embed(x)
        for layer in self.layers:
            before, h = h, layer(h) + before
        return h.sum()


class Borrowed(Stack):
    """A weight of one layer is read at the end as well."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return F.linear(h, self.layers[5].up.weight).sum()  # type: ignore[arg-type,union-attr]


def _said(captured: Captured) -> list[str]:
    """All that is known of each node, under names that count."""
    nodes = list(captured.gm.graph.nodes)
    names, numbers = {node: f"%{i}" for i, node in enumerate(nodes)}, dict[Any, int]()
    found = []
    for node in nodes:
        number = node.meta.get("seq_nr")
        value = node.meta.get("val")
        found.append(
            f"{node.op} {node.target if node.op == 'call_function' else ''} "
            f"{fx.map_arg((node.args, dict(node.kwargs)), names.__getitem__)} {meta(node)} "
            f"{value.stride() if isinstance(value, Tensor) else ''} {node.meta.get('is_gradient_acc')} "
            f"{number if number is None else numbers.setdefault(number, len(numbers))}"
        )
    return found


def _both(
    model: nn.Module, inputs: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Captured, Captured]:
    """Captured from a few layers, and full."""
    monkeypatch.setenv("FXDP_CACHE", "0")
    made = capture(model, inputs, {}, **options)
    monkeypatch.setenv("FXDP_SHORTCUTS", "-repeated_joint")
    return made, capture(model, inputs, {}, **options)


@pytest.mark.parametrize(
    ("kind", "options"), [(Stack, {}), (Stack, {"couple": False}), (Biased, {}), (Scaled, {})]
)
def test_many_layers_are_traced_as_few(
    kind: type[nn.Module], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expanded: list[int] = []
    real = joint_by_layer.expanded

    def counted(few: Reduced, short: fx.GraphModule, *rest: Any) -> fx.GraphModule:
        full = real(few, short, *rest)
        expanded.append(len(full.graph.nodes) - len(short.graph.nodes))
        return full

    monkeypatch.setattr(joint_by_layer, "expanded", counted)
    width = 3 if issubclass(kind, Stack) else 4
    made, full = _both(kind(), (torch.randn(5, width),), monkeypatch, **options)
    assert _said(made) == _said(full)
    assert (made.conditions, made.detached, made.symbols) == (full.conditions, full.detached, full.symbols)
    assert expanded[0] > 50


def _reduced(model: nn.Module) -> Reduced:
    inputs = read_inputs(model, (torch.randn(5, 3),), {}, None)
    with capture_patches(model, None):
        exported = export(FlatModule(model, inputs, None), inputs.batch_dims, 7, symbolic=True)
        return joint_by_layer.reduced_forward(exported, 2)


@pytest.mark.parametrize("model", [Frozen, Read, Skipping, Borrowed, Outside, lambda: Stack(6)])
def test_layers_that_differ_or_are_few_are_all_traced(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(OtherLayersError):
        _reduced(model())


def test_those_in_the_midst_are_left_out() -> None:
    few = _reduced(Stack())
    assert (few.layers.container, few.template, few.dropped) == ("layers", 2, [3, 4, 5, 6, 7])
