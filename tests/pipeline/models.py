"""Small models for pipelines, each returning its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.capture import unet as skippable
from tests.capture import zoo


class Join(nn.Module):
    """Takes values of three earlier layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def forward(self, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
        process_mesh: Tensor = self.linear(third + first * second)
        return process_mesh


class Skips(nn.Module):
    """A skip from the first to the last of four layers, and a value that two later layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 8)
        self.d = Join()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        first = torch.relu(self.a(x))
        second = torch.tanh(self.b(first))
        third = torch.relu(self.c(second) * second)
        logits = self.d(first, second, third)
        return {"loss": F.cross_entropy(logits, y), "logits": logits, "early": first}


class UNet(nn.Module):
    """Down and up again, each level handing its features across."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 4, 3, padding=1)
        self.down1 = nn.Conv2d(4, 6, 3, padding=1)
        self.down2 = nn.Conv2d(6, 8, 3, padding=1)
        self.up2 = nn.Conv2d(8 + 6, 6, 3, padding=1)
        self.up1 = nn.Conv2d(6 + 4, 4, 3, padding=1)
        self.leave = nn.Conv2d(4, 2, 1)
        self.norm = nn.GroupNorm(2, 6)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        level0 = torch.relu(self.enter(x))
        level1 = torch.relu(self.down1(F.max_pool2d(level0, 2)))
        level2 = torch.relu(self.down2(F.avg_pool2d(level1, 2)))
        up = F.interpolate(level2, scale_factor=2)
        up = torch.relu(self.norm(self.up2(torch.cat([up, level1], 1))))
        up = F.interpolate(up, scale_factor=2)
        up = torch.relu(self.up1(torch.cat([up, level0], 1)))
        return {"loss": F.mse_loss(self.leave(up), target)}


def skips(batch: int) -> dict[str, Any]:
    labels = torch.randint(0, 5, (batch,))
    labels[0] = -100
    return {"x": torch.randn(batch, 6), "y": labels}


def unet(batch: int) -> dict[str, Any]:
    return {"x": torch.randn(batch, 3, 8, 8), "target": torch.randn(batch, 2, 8, 8)}


BY_HAND: dict[str, tuple[Any, Any]] = {
    "skips": (Skips, skips),
    "unet": (UNet, unet),
    "skippable": (skippable.UNet, skippable.unet_inputs),
}


def build(name: str) -> nn.Module:
    """A model in float64 with the same weights on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BY_HAND[name][0]().double() if name in BY_HAND else zoo.make(name)


def inputs(name: str, batch: int) -> dict[str, Any]:
    """A global batch, the same on all ranks."""
    make = BY_HAND[name][1] if name in BY_HAND else zoo.ZOO[name][1]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
        try:
            found: dict[str, Any] = make(batch)
            return found
        finally:
            torch.set_default_dtype(torch.float32)
