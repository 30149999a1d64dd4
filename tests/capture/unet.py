"""A U-Net whose long skips are stashed and popped, some of them in namespaces."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxdp.skip import Namespace, pop, skippable, stash


@skippable(stash=["long"])
class Down(nn.Module):
    """Features for the way up at the same size, then half the size."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm = nn.GroupNorm(2, outside)

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        x = self.norm(self.conv(x)).relu()
        yield stash("long", x)
        return F.max_pool2d(x, 2)


@skippable(pop=["long"])
class Up(nn.Module):
    """Twice the size, beside the features from the way down."""

    def __init__(self, inside: int, beside: int, outside: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside + beside, outside, 3, padding=1)

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        long = yield pop("long")
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return self.conv(torch.cat([x, long], 1)).relu()


class UNet(nn.Module):
    """Three levels; returns the loss and the images."""

    def __init__(self) -> None:
        super().__init__()
        spaces = [Namespace(), None, Namespace()]
        self.net = nn.Sequential(
            Down(1, 4).isolate(spaces[0]),
            Down(4, 6).isolate(spaces[1]),
            Down(6, 8).isolate(spaces[2]),
            nn.Conv2d(8, 8, 1),
            Up(8, 8, 6).isolate(spaces[2]),
            Up(6, 6, 4).isolate(spaces[1]),
            Up(4, 4, 4).isolate(spaces[0]),
            nn.Conv2d(4, 1, 1),
        )

    def forward(self, images: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        found = self.net(images)
        return F.mse_loss(found, target), found


def unet_inputs(batch: int) -> dict[str, Tensor]:
    """Noisy images and clean ones."""
    return {"images": torch.randn(batch, 1, 8, 8), "target": torch.randn(batch, 1, 8, 8)}
