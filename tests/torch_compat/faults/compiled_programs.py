"""Faults of torch in code compiled by Inductor, shown by tiny programs of plain torch (seconds each)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxdp.torch_compat import aten


def counted_masks() -> bool:
    """Return whether compilation fails if equal masks, used twice to select rows by kind, are merged."""

    def by_kind(x: Tensor, weights: Tensor) -> Tensor:
        for _ in range(2):
            kind = 0 * torch.ones(x.shape[0])
            new = torch.zeros_like(x)
            for i in range(3):
                new[kind == i] = x[kind == i] @ weights[i]
            x = x + new.relu()
        return x

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        try:
            _compiled(by_kind)(torch.ones(5, 4), torch.ones(3, 4, 4, requires_grad=True)).sum().backward()
        except Exception as error:
            return "Inductor" in type(error).__name__ and bool(re.search(r"u\d+ (->|not in)", str(error)))
    return False


def average_pool() -> bool:
    """Return whether compiled average pooling miscounts windows beyond the image's edge (`ceil_mode`)."""

    def backward(gradient: Tensor, x: Tensor) -> Tensor:
        return aten.avg_pool2d_backward.default(gradient, x, [2, 2], [2, 2], [0, 0], True, True, None)  # type: ignore[no-any-return]

    given = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 5, 5)
    return not torch.allclose(_compiled(backward)(*given), backward(*given))


def no_images() -> bool:
    """Return whether the compiled backward of a convolution fails on an empty batch."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1))
    try:
        _compiled(model)(torch.ones(0, 3, 16, 16)).square().sum().backward()
    except AssertionError as error:
        return "convolution_backward" in str(error)
    return False


def kept_order() -> bool:
    """Return whether compiled gradients of images that are enlarged twice differ from eager gradients."""

    class Rest(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x  # type: ignore[no-any-return,no-untyped-call]

    def twice() -> nn.Module:
        return nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        rest = Rest(nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        model = nn.Sequential(
            rest, twice(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3, padding=1), twice(),
            nn.Conv2d(4, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 1, 1), nn.ReLU(),
        ).double()  # fmt: skip
        images = torch.randn(4, 8, 8, 8, dtype=torch.float64)
    found = [
        torch.autograd.grad(run(images).squeeze(1).square().mean(), list(model.parameters()))
        for run in (_compiled(model), model)
    ]
    return any((ours - theirs).abs().max() > 1e-10 for ours, theirs in zip(*found, strict=True))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)
