"""Models of the visible zoo that are no transformers models."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class UNet(nn.Module):
    """Two levels down and up again, with a skip at each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _block(3, 4), _block(4, 6)
        self.bottom = _block(6, 8)
        self.up_second, self.up_first = nn.ConvTranspose2d(8, 6, 2, 2), nn.ConvTranspose2d(6, 4, 2, 2)
        self.out_second, self.out_first = _block(12, 6), _block(8, 4)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        bottom = self.bottom(F.avg_pool2d(second, 2))
        second = self.out_second(torch.cat([self.up_second(bottom), second], 1))
        first = self.out_first(torch.cat([self.up_first(second), first], 1))
        out = self.head(first)
        return F.binary_cross_entropy_with_logits(out, y), out


def _block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.SiLU())
