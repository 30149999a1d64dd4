"""The visible zoo: the models that the exactness catalogue names, and CLIP."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.capture import zoo
from tests.exactness.models import BY_HAND
from tests.zoo.by_hand import UNet
from tests.zoo.decoders import gpt_neo, mamba
from tests.zoo.encoders import deberta
from tests.zoo.entry import SIDE, Entry, Inputs, causal, masked


def _by_hand(model: type[nn.Module], inputs: Callable[[int], tuple[Any, ...]], batch_dims: Any) -> Entry:
    names = list(inspect.signature(model.forward).parameters)[1:]
    return Entry(model, lambda n: dict(zip(names, inputs(n), strict=True)), batch_dims)


def _segments(batch: int) -> Inputs:
    return {"x": torch.randn(batch, 3, SIDE, SIDE), "y": torch.rand(batch, 1, SIDE, SIDE)}


VISIBLE: dict[str, Entry] = {
    **{name: Entry(build, inputs) for name, (build, inputs, _) in zoo.ZOO.items()},
    "mamba": Entry(mamba, causal),
    "gpt_neo": Entry(gpt_neo, causal),
    "deberta": Entry(deberta, masked),
    "unet": Entry(UNet, _segments),
    **{name: _by_hand(*parts) for name, parts in BY_HAND.items()},
}
