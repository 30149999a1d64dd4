"""A decoder of a few layers as people write them: learned or rotary positions, a head tied or not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a gated network, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, iteration: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if iteration is not None:
            q, k = (_turned(one, *iteration) for one in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(batch, length, width))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, one], -1) * sin


class Decoder(nn.Module):
    """A language model and its loss."""

    def __init__(
        self, layers: int = 6, *, tied: bool = False, rotary: bool = False, width: int = 16, words: int = 48
    ) -> None:
        super().__init__()
        self.heads, self.rotary = 2, rotary
        self.words = nn.Embedding(words, width)
        self.places = None if rotary else nn.Embedding(8, width)
        self.layers = nn.ModuleList(Block(width, self.heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, iteration = self.words(x), None
        if self.places is None:
            speeds = torch.linspace(0, 1, h.shape[-1] // self.heads // 2, dtype=h.dtype)
            angles = torch.arange(x.shape[1], dtype=h.dtype)[:, None] * speeds
            angles = torch.cat([angles, angles], -1)
            iteration = angles.cos(), angles.sin()
        else:
            h = h + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            h = layer(h, iteration)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def sentences(batch: int, words: int = 48) -> tuple[Tensor, Tensor]:
    """Words, and those that follow."""
    made = torch.arange(batch * 9).reshape(batch, 9) * 7 % words
    return made[:, :-1], made[:, 1:]
