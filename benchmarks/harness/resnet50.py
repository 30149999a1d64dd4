"""ResNet-50 (He et al., 2015), with the stride in the 3x3 convolution as torchvision has it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with BatchNorm, and a way around them."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outer, 1, bias=False), nn.BatchNorm2d(outer)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.around = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        """Add the two ways."""
        inside = F.relu(self.norm1(self.conv1(x)))
        inside = F.relu(self.norm2(self.conv2(inside)))
        return F.relu(self.norm3(self.conv3(inside)) + self.around(x))


class ResNet50(nn.Sequential):
    """Four stages of bottlenecks; `width` is 64 in the paper."""

    def __init__(self, width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers.append(nn.MaxPool2d(3, 2, 1))
        inner = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                layers.append(Bottleneck(inner, width << stage, 2 if stage and not block else 1))
                inner = 4 * (width << stage)
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes))
