"""The models of the benchmarks, each with its loss inside and nothing that knows of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from fxdp.cli.demo.model import GPT, GPTConfig


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and the batch that each rank gets of it."""

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    local_batch: int

    def model(self, device: torch.device) -> nn.Module:
        """The model; every call makes the same parameters."""
        torch.manual_seed(0)
        return self.make().to(device)

    def batch(self, step: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The global batch of a step, the same on every rank."""
        return self.draw(self.local_batch * ranks, torch.Generator().manual_seed(step))


class Classifier(nn.Module):
    """A body and its cross-entropy."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of the batch."""
        return F.cross_entropy(self.body(x), target)


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a way around them."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.around = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the two ways."""
        inside = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inside + self.around(x))


def resnet(width: int = 32, blocks: int = 2) -> nn.Module:
    """A ResNet of three stages for images of 32x32."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inner = width
    for stage in range(3):
        outer = width << stage
        for block in range(blocks):
            layers.append(Residual(inner, outer, 2 if stage and not block else 1))
            inner = outer
    return Classifier(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 10)))


def mlp(layers: int = 40, width: int = 256) -> nn.Module:
    """A deep and narrow network: many small parameters, little arithmetic."""
    overlapped = [module for _ in range(layers - 1) for module in (nn.Linear(width, width), nn.ReLU())]
    return Classifier(nn.Sequential(*overlapped, nn.Linear(width, 10)))


def _text(size: int, generator: torch.Generator, length: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(1024, (size, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _small_text(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = _text(size, generator, length=16)
    return tokens % 64, targets % 64


def _images(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(size, 3, 32, 32, generator=generator)
    return images, torch.randint(10, (size,), generator=generator)


def _rows(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 256, generator=generator), torch.randint(10, (size,), generator=generator)


class UntiedGPT(GPT):
    """The GPT with a head of its own, so that no parameter is in two stages."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """The mean loss of the batch, or the logits if there are no targets."""
        logits = self.part(tokens, 0, len(self.blocks))
        return logits if targets is None else next_token_loss(logits, targets)

    def part(self, x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Blocks `begin` to `end`, with the embeddings before the first and the head after the last."""
        if begin == 0:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks[begin:end]:
            x = block(x)
        return self.head(self.norm(x)) if end == len(self.blocks) else x


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


CASES = {
    case.name: case
    for case in (
        Case("gpt", lambda: GPT(GPTConfig(1024, 128, layers=6, width=256, heads=4)), _text, local_batch=4),
        Case("gpt-untied", lambda: UntiedGPT(GPTConfig(1024, 128, 6, 256, 4)), _text, local_batch=4),
        Case("gpt-untied-8", lambda: UntiedGPT(GPTConfig(1024, 128, 8, 256, 4)), _text, local_batch=4),
        Case("resnet", resnet, _images, local_batch=16),
        Case("mlp", mlp, _rows, local_batch=32),
        Case("tiny-gpt", lambda: UntiedGPT(GPTConfig(64, 128, 2, 32, 2)), _small_text, local_batch=4),
        Case("tiny", lambda: mlp(3, 256), _rows, local_batch=4),  # to try the benchmark itself
    )
}
