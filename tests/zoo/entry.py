"""A model of the sweep, and random inputs of the kinds that models take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

TOKENS = 40
"""The size of all vocabularies."""
LENGTH = 6
"""Tokens per sample."""
SIDE = 16
"""Pixels along each side of an image."""

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """A model and its inputs; both are made anew, from the caller's seed."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    """The keyword arguments of a batch of this size."""
    batch_dims: Any = None


class Flattened(nn.Module):
    """A model some of whose inputs have several rows for each sample; they are given with a dim for these."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs | {name: inputs[name].flatten(0, 1) for name in self.names})


def tokens(batch: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, TOKENS, (batch, length))


def labels(batch: int, length: int = LENGTH) -> Tensor:
    """Labels that some rows have fewer of: a mean per rank is not the mean."""
    made = tokens(batch, length)
    made[torch.rand(made.shape) < 0.4] = -100
    made[-1, 2:] = -100
    return made


def mask(batch: int, length: int = LENGTH) -> Tensor:
    """The first sample is shorter than the others."""
    made = torch.ones(batch, length, dtype=torch.long)
    made[0, length - 2 :] = 0
    return made


def causal(batch: int) -> Inputs:
    return {"input_ids": tokens(batch), "labels": labels(batch)}


def masked(batch: int) -> Inputs:
    return {"input_ids": tokens(batch), "attention_mask": mask(batch), "labels": labels(batch)}


def images(batch: int, side: int = SIDE) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.randint(0, 2, (batch,))}


def pixels(batch: int, side: int = SIDE) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, side, side)}


def pairs(batch: int) -> Inputs:
    """Texts, images, and the contrastive loss between them."""
    return {"input_ids": tokens(batch), **pixels(batch), "return_loss": True}


def built(model: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Builds a transformers model of this class, its own config class given the sizes."""

    def build() -> nn.Module:
        made = getattr(transformers, model)
        return made(made.config_class(**sizes))  # type: ignore[no-any-return]

    return build
