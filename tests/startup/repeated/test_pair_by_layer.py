"""Halves of many layers that are made from those of a few equal the ones that are traced and cut full."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxdp
from fxdp.compiler import lowered_parts
from fxdp.compiler.emit import lower_part
from fxdp.ir.graph.metadata import meta
from fxdp.lowering.inductor import compile as compiling
from fxdp.lowering.inductor import forward_backward
from fxdp.lowering.inductor.forward_backward import Cut, Signature, cut
from fxdp.lowering.inductor.strides import results
from fxdp.lowering.shapes import Shapes
from fxdp.startup.repeated import pair_by_layer
from tests.captures import KNOWN, captured_once

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")

LAYERS = 10


class Residual(nn.Module):
    """Statistics that are written, a product whose operands are laid out, and what both halves read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(torch.cat([F.gelu(a), b.relu()], -1))


class Stack(nn.Module):
    """Layers between an embedding and a head that share a weight."""

    def __init__(self, layer: Callable[[], nn.Module] = Residual, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return (h @ self.head.weight).square().mean()


class Outputs(Stack):
    """What each layer gives is an output; the last one's is like the model's head of no layer."""

    def __init__(self) -> None:
        super().__init__(layers=LAYERS + 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        h, found = self.embed(x), []
        for layer in self.layers:
            h = layer(h)
            found.append(h.detach())
        return ((h @ self.head.weight).square().mean(), *found)


class Attending(nn.Module):
    """Attention of two heads under a mask that all layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT + mask).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class Masked(Stack):
    """A mask that is computed once."""

    def __init__(self) -> None:
        super().__init__(Attending)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril().log()
        for layer in self.layers:
            h = layer(h, mask)
        return (h @ self.head.weight).square().mean()


class Image(nn.Module):
    """A convolution, whose operands Inductor lays out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x)).relu()


class Images(nn.Module):
    """A residual network of one width."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.Sequential(*(Image() for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.embed(x)).square().mean()


class Noisy(Stack):
    """Layers that draw random numbers."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(Residual(), nn.Dropout(0.5)))


class Stopped(BaseException):
    """Nothing more is to be done than to cut."""


def _form(found: Cut, visible: int) -> list[str]:
    """All of both halves but the order of what is saved, under names that count."""
    lines: list[str] = []
    forward = _lines(found.forward, lambda i: f"input {i}", lines)
    saved = results(found.forward)[visible:]
    lines.append(f"gives {[forward[n] for n in results(found.forward)[:visible]]}")
    if found.backward is not None:
        taken = [forward[saved[i]] for i in found.saved_order]
        backward = _lines(
            found.backward, lambda i: taken[i] if i < len(taken) else f"tangent {i - len(taken)}", lines
        )
        lines.append(f"gives {[n and backward[n] for n in results(found.backward)]}")
    return lines


def _lines(gm: fx.GraphModule, given: Callable[[int], str], lines: list[str]) -> dict[fx.Node, str]:
    names: dict[fx.Node, str] = {}
    memory: dict[int, int] = {}
    inputs = gm.graph.find_nodes(op="placeholder")
    assert len({node.target for node in inputs}) == len(inputs)  # they are the names of arguments
    for i, node in enumerate(inputs):
        names[node] = given(i)
    lines += sorted(f"{name}: {_lies(node.meta.get('val'), {})}" for node, name in names.items())
    for node in gm.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            arguments = fx.map_arg((node.args, dict(node.kwargs)), names.__getitem__)
            names[node] = f"%{len(names)}"
            where = meta(node).location.module
            lines.append(f"{node.target} {arguments} {_lies(node.meta.get('val'), memory)} in {where}")
    return names


def _lies(value: Any, memory: dict[int, int]) -> object:
    """How a value lies, and in whose memory, by the order in which these are met."""
    if isinstance(value, (list, tuple)):
        return [_lies(one, memory) for one in value]
    if not isinstance(value, Tensor):
        return str(value)
    where = memory.setdefault(value.untyped_storage()._cdata, len(memory))
    return value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), where


def _both(
    model: nn.Module, inputs: Tensor, monkeypatch: pytest.MonkeyPatch, *, generic: bool = False
) -> tuple[list[str], list[str], bool]:
    """The halves of a program cut by layer, and cut full; whether layers were left out at first."""
    forms: list[list[str]] = []

    def compared(gm: Any, values: Any, shapes: Shapes, device: Any, budget: float) -> Cut:
        made, visible = cut(gm, values, shapes, device, budget), Signature.of(gm).outputs
        with monkeypatch.context() as patch:
            patch.setattr(forward_backward, "partition", forward_backward.partition.own)
            full = cut(gm, values, shapes, device, budget)
        forms.extend(_form(one, visible) for one in (made, full))
        raise Stopped

    expanded: list[Any] = []
    real = pair_by_layer.expanded
    monkeypatch.setattr(pair_by_layer, "expanded", lambda *a: expanded.append(a) or real(*a))
    monkeypatch.setattr(compiling, "cut", compared)
    monkeypatch.setattr(lowered_parts, "lower_part", partial(_lower_part, wanted=generic))
    monkeypatch.setenv("FXDP_CACHE", "0")
    with pytest.raises(Stopped), captured_once(KNOWN.setdefault(__name__, {})):
        fxdp.compile(model)(inputs)
    return forms[0], forms[1], bool(expanded)


def _lower_part(*args: Any, wanted: bool, **options: Any) -> Any:
    return lower_part(*args, **{**options, "generic": wanted})


_ROWS, _WORDS, _IMAGES = (5, 3), (2, 6, 3), (2, 3, 6, 6)


@pytest.mark.parametrize(
    ("kind", "shape", "generic"),
    [
        (Stack, _ROWS, True),
        (Outputs, _ROWS, False),
        (Masked, _WORDS, False),
        (Masked, _WORDS, True),
        (Images, _IMAGES, False),
    ],
)
def test_many_layers_are_cut_as_few(
    kind: type[nn.Module], shape: tuple[int, ...], generic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, full, by_layer = _both(kind(), torch.randn(shape), monkeypatch, generic=generic)
    assert made == full
    assert by_layer


@pytest.mark.parametrize("kind", [Noisy])
def test_layers_that_draw_are_cut_one_by_one(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    made, full, by_layer = _both(kind(), torch.randn(_ROWS), monkeypatch)
    assert made == full
    assert not by_layer
