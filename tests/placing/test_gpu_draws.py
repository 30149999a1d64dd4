"""One device's numbers on a GPU: attention that draws is gathered, dropout begins where it would."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.errors import PlacementError
from fxdp.ir.graph.metadata import meta
from tests.exactness.cases import Model
from tests.fallbacks import no_fallback
from tests.lockstep import compiled

aten = torch.ops.aten
ONE_DEVICE: dict[str, Any] = {"rng": "single-device"}


def _attention(probability: float) -> Callable[..., Tensor]:
    def body(layer: nn.Module, x: Tensor) -> Tensor:
        q = layer(x).view(-1, 4, 2, 8).transpose(1, 2)
        op = aten._scaled_dot_product_efficient_attention.default  # of which CPUs know the shapes
        attended: Tensor = op(q, q, q, None, True, probability)[0]
        return attended.square().mean()

    return body


def _placed(body: Callable[..., Tensor], **options: Any) -> dict[str, str]:
    model = Model(body, nn.Linear(16, 16))
    local, _ = compiled(model, (torch.randn(4, 4, 16),), {}, 2, **options)
    placed = {}
    for node in local.gm.graph.nodes:
        if "efficient_attention" in str(node.target):
            kind = "backward" if "backward" in str(node.target) else "forward"
            placed[kind] = ", ".join(map(str, meta(node).placement))
    return placed


@pytest.mark.parametrize(
    ("probability", "rng", "full"),
    [(0.1, "single-device", True), (0.1, "sharded", False), (0.0, "single-device", False)],
)
def test_attention_draws_its_mask_again_for_the_batch_it_drew_it_for(
    probability: float, rng: str, full: bool
) -> None:
    found = _placed(_attention(probability), rng=rng)
    assert found == {
        "forward": "R, R, R, R" if full else "S(0), S(0), R, R",
        "backward": "R, R, R, None" if full else "S(0), S(0), S(0), None",
    }


def _dropped(body: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda layer, x: aten.native_dropout(body(layer(x)), 0.5, True)[0].square().mean()


@pytest.mark.parametrize(
    ("body", "gaps"),
    [
        (lambda h: h, []),
        (lambda h: h[:, 0], [0]),
        (lambda h: h[..., 1:3], [1]),
        (lambda h: h[:, :1].expand(-1, 4, -1), [1]),
        (lambda h: h.transpose(0, 1)[2:], [1]),
    ],
)
def test_a_dropout_of_a_gpu_draws_for_memory_with_the_same_gaps(
    body: Callable[[Tensor], Tensor], gaps: list[int]
) -> None:
    """As it takes one element at a time there, and otherwise several."""
    local, _ = compiled(
        Model(_dropped(body), nn.Linear(16, 32)), (torch.randn(4, 4, 16),), {}, 2, **ONE_DEVICE
    )
    (draw,) = (n for n in local.gm.graph.nodes if "whole_native_dropout" in str(n.target))
    found = dict(zip((a.name for a in draw.target._schema.arguments), draw.args, strict=False)) | draw.kwargs
    assert found["gaps"] == gaps


def test_a_dropout_of_what_begins_in_the_middle_is_refused() -> None:
    """With the line and the remedy; where the start is a multiple of what kernels take, it is not."""
    args = (torch.randn(4, 4, 16),)
    for width, refused in ((32, False), (16, True)):
        body = _dropped(lambda h: h.transpose(0, 1).contiguous()[1:])
        model = Model(body, nn.Linear(16, width))
        if not refused:
            compiled(model, args, {}, 2, **ONE_DEVICE)
            continue
        with pytest.raises(PlacementError, match="begins in the middle of another one's") as told:
            compiled(model, args, {}, 2, **ONE_DEVICE)
        assert "cases.py:32" in str(told.value)
        assert ".clone()" in str(told.value)
        compiled(model, args, {}, 2)


def _masked(make: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def body(layer: nn.Module, x: Tensor) -> Tensor:
        q = layer(x).view(-1, 4, 2, 8).transpose(1, 2)
        bias = make(x).expand(-1, 2, -1, -1)
        attended: Tensor = aten._scaled_dot_product_efficient_attention.default(q, q, q, bias, True, 0.1)[0]
        return attended.square().mean()

    return body


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (lambda x: x.new_zeros(x.shape[0], 1, 4, 4), True),
        (lambda x: torch.where(torch.arange(4) > torch.zeros_like(x[:, None, :, :4]), 0.0, -1.0), True),
        (lambda x: torch.where(x[:, None, :, :4] > -1, 0.0, -1.0), False),
    ],
)
def test_attention_with_a_mask_that_only_captured_code_may_make_is_refused(
    make: Callable[[Tensor], Tensor], refused: bool
) -> None:
    model, args = Model(_masked(make), nn.Linear(16, 16)), (torch.randn(4, 4, 16),)
    with pytest.raises(PlacementError, match="attention_mask is passed") if refused else nullcontext():
        compiled(model, args, {}, 2, **ONE_DEVICE)
    compiled(model, args, {}, 2)


def test_attention_that_draws_goes_through_inductor() -> None:
    """As far as a CPU has its kernel: it is compiled, and cannot run."""
    model = Model(_attention(0.1), nn.Linear(16, 16))
    with no_fallback(), pytest.raises(NotImplementedError, match="_scaled_dot_product_efficient_attention"):
        fxdp.compile(model)(torch.randn(4, 4, 16))
