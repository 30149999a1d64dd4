"""A diffusion U-Net with declared skip connections: eagerly, or on any number of ranks.

    python examples/skippable_unet.py --plain
    python examples/skippable_unet.py
    torchrun --nproc-per-node 2 examples/skippable_unet.py

It learns which noise is in a digit, at any level of noise: the denoising step of a diffusion model. The level
is a second channel of the image. The model is a plain `nn.Sequential`: its skips are stashed on the way down
and popped on the way up, so no module in between passes them on. `--plain` trains it without fxdp, with the
same losses.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Generator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.skip import Namespace, pop, skippable, stash, verify_skippables


@skippable(stash=["skip"])
class Down(nn.Module):
    """Features at this size, which are stashed; then half the size."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        """The smaller features."""
        x = self.body(x)
        yield stash("skip", x)
        return F.avg_pool2d(x, 2)


@skippable(pop=["skip"])
class Up(nn.Module):
    """Twice the size, together with the features that were stashed at that size."""

    def __init__(self, inside: int, skip: int, outside: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside + skip, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        """The larger features."""
        skip = yield pop("skip")
        return self.body(torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1))


def make_model() -> nn.Sequential:
    """Images of 8x8 down to 2x2 and up again; each pair of stash and pop has its namespace."""
    torch.manual_seed(0)
    outer, inner = Namespace(), Namespace()
    model = nn.Sequential(
        Down(2, 16).isolate(outer),
        Down(16, 32).isolate(inner),
        nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU()),
        Up(32, 32, 16).isolate(inner),
        Up(16, 16, 16).isolate(outer),
        nn.Conv2d(16, 1, 1),
    )
    verify_skippables(model)
    return model


def load() -> tuple[Tensor, Tensor]:
    """Digits with noise of a level drawn for each, beside that level; and the noise."""
    clean = torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8)
    drawn = torch.Generator().manual_seed(0)
    noise = torch.randn(clean.shape, generator=drawn)
    kept = torch.rand(len(clean), 1, 1, 1, generator=drawn)  # of the digit's variance, the rest is noise
    noisy = kept.sqrt() * clean + (1 - kept).sqrt() * noise
    return torch.cat([noisy, kept.expand_as(clean)], dim=1), noise


def main() -> None:
    """Train, and print the loss of each epoch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--plain", action="store_true", help="the nn.Sequential itself, on one device")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    asked = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if asked.plain and ranks > 1:
        parser.error("--plain trains on one device: start it with python, not torchrun")

    noisy, noise = (images[: asked.images] for images in load())
    model = make_model()
    compiled = None if asked.plain else fxdp.compile(model, loss_fn=F.mse_loss, backend=asked.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(asked.epochs):
        order = torch.randperm(len(noise), generator=torch.Generator().manual_seed(epoch))
        total = 0.0
        for batch in order.split(64):
            mine = batch.tensor_split(ranks)[rank]
            if compiled is None:
                loss = F.mse_loss(model(noisy[mine]), noise[mine])
            else:
                loss = compiled(noisy[mine], target=noise[mine])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(batch)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total / len(noise):.6f}")


if __name__ == "__main__":
    main()
