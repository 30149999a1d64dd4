"""The plain training loop, shared by one device and all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import isnan
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from fxdp.cli.demo.command import DemoOptions
from fxdp.cli.demo.data import TextBatch
from fxdp.cli.demo.model import GPT, GPTConfig
from fxdp.errors import InputError

LENGTH = 128


class TrainingStep(NamedTuple):
    """One finished step."""

    loss: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Curve:
    """One finished run."""

    steps: tuple[TrainingStep, ...]

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of each step."""
        return tuple(step.loss for step in self.steps)

    @property
    def step_seconds(self) -> float:
        """The median time of a step; the first step, which may compile, counts only if there is no second."""
        return median(step.seconds for step in self.steps[1:] or self.steps)

    def differences(self, reference: Curve) -> list[float]:
        """Return the difference of each loss from the reference, relative to the reference."""
        pairs = zip(self.losses, reference.losses, strict=True)
        return [abs(loss - expected) / abs(expected) for loss, expected in pairs]

    def largest_difference(self, reference: Curve) -> float:
        """Return the largest of these differences."""
        found = self.differences(reference)
        return float("inf") if any(map(isnan, found)) else max(found)  # nan is no agreement


def make_model(options: DemoOptions) -> nn.Module:
    """Return the model to train; every call creates equal parameters."""
    torch.manual_seed(0)
    size = GPTConfig(length=LENGTH)
    model = GPT(size) if options.model == "plain" else _transformers_gpt2(size)
    return model.to(options.device, getattr(torch, options.dtype))


def _transformers_gpt2(size: GPTConfig) -> nn.Module:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise InputError(
            "--model transformers: transformers is not installed. Install it (pip install transformers) "
            "or leave --model out."
        ) from None
    config = GPT2Config(
        vocab_size=size.vocabulary,
        n_positions=size.length,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        resid_pdrop=0.0,  # dropout masks of one device differ from masks of several ranks
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def call(options: DemoOptions, model: Callable[..., object], batch: TextBatch) -> torch.Tensor:
    """Return the loss of one batch; transformers shifts the targets by itself."""
    if options.model == "plain":
        loss = model(batch.tokens, batch.targets)
    else:
        loss = getattr(model(input_ids=batch.tokens, labels=batch.tokens), "loss", None)
    assert isinstance(loss, torch.Tensor)
    return loss


def train(
    loss_of: Callable[[TextBatch], torch.Tensor],
    parameters: Iterable[nn.Parameter],
    batches: Iterable[TextBatch],
) -> Iterator[TrainingStep]:
    """Train, yielding after each step."""
    optimizer = torch.optim.AdamW(parameters, lr=5e-4, eps=1e-6)  # the default eps amplifies rounding errors
    for batch in batches:
        start = time.perf_counter()
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        yield TrainingStep(value, time.perf_counter() - start)
