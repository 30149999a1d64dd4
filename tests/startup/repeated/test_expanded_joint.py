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
from fxdp.startup.repeated.repeated_forward import Layers
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


class Biased(nn.Module):
    """A learned bias that the first layer computes and all read; parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.ParameterList(torch.rand(4) for _ in range(LAYERS))
        self.bias = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        shared = None
        for scale in self.scale:
            if shared is None:
                shared = torch.outer(self.bias, self.bias).softmax(-1)
            h = torch.relu(x * scale) @ shared
            x = F.layer_norm(x + torch.tanh(h) * h.sigmoid(), (4,))
        return x.logsumexp(-1).sum()


class Scaled(nn.Module):
    """A backward that reads no parameters, but what the forward made of them, and of the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(4) for _ in range(LAYERS + 1))
        self.weights = nn.ParameterList(torch.rand(4, 4) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for scale, weight in zip(self.scales, self.weights, strict=False):
            normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + scale)
            x = x + torch.tanh(normed @ weight.t()) @ weight
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * (1 + self.scales[-1])).sum()


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
        return F.linear(h, self.layers[2].up.weight).sum()  # type: ignore[arg-type,union-attr]


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
) -> tuple[Captured, Captured, list[int]]:
    """Captured from a few layers, and full; how many layers were found, each time."""
    counts = []
    find: Callable[..., Any] = joint_by_layer.find_layers

    def found(exported: Any) -> Any:
        layers = find(exported)
        counts.append(0 if layers is None else layers.count)
        return layers

    monkeypatch.setenv("FXDP_CACHE", "0")
    monkeypatch.setattr(joint_by_layer, "find_layers", found)
    made = capture(model, inputs, {}, **options)
    monkeypatch.setattr(joint_by_layer, "find_layers", lambda _: None)
    return made, capture(model, inputs, {}, **options), counts


@pytest.mark.parametrize(
    ("kind", "options"), [(Stack, {}), (Stack, {"couple": False}), (Biased, {}), (Scaled, {})]
)
def test_many_layers_are_traced_as_few(
    kind: type[nn.Module], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expanded: list[int] = []
    real = joint_by_layer.expanded

    def counted(short: fx.GraphModule, *rest: Any) -> fx.GraphModule:
        long = real(short, *rest)
        expanded.append(len(long.graph.nodes) - len(short.graph.nodes))
        return long

    monkeypatch.setattr(joint_by_layer, "expanded", counted)
    width = 3 if issubclass(kind, Stack) else 4
    made, full, counts = _both(kind(), (torch.randn(5, width),), monkeypatch, **options)
    assert _said(made) == _said(full)
    assert (made.conditions, made.detached, made.symbols) == (full.conditions, full.detached, full.symbols)
    assert counts[0] >= LAYERS - 1
    assert expanded[0] > 50


def _row(model: nn.Module) -> Layers | None:
    """The layers that are found before anything is traced; without them all is traced as it is."""
    inputs = read_inputs(model, (torch.randn(5, 3),), {}, None)
    with capture_patches(model, None):
        exported = export(FlatModule(model, inputs, None), inputs.batch_dims, 7, symbolic=True)
        return joint_by_layer.find_layers(exported)


@pytest.mark.parametrize("kind", [Frozen, Read, Skipping, Borrowed])
def test_layers_that_are_no_row_are_traced_whole(kind: type[nn.Module]) -> None:
    assert _row(kind()) is None


def test_few_layers_are_no_row() -> None:
    assert _row(Stack(4)) is None
    assert _row(Stack()) is not None
