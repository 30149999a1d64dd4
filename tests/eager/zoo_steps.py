"""Small transformers models of the zoo, uncompiled, in training with dropout, on global tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.eager.programs import Batch, Program, gradients
from tests.zoo.catalogue import CATALOGUE
from tests.zoo.entry import Entry

SAMPLES = 6
"""A batch as long as the zoo's texts."""
ROUNDED = dict.fromkeys(("mixtral", "qwen2", "gemma2"), 1e-6)
"""Models that compute in float32 within themselves, with the difference that its rounding may make."""
NAMES = (
    "gpt2", "llama", "bert", "t5", "vit", "mixtral", "gpt_neo", "deberta", "gemma2", "qwen2", "opt", "bloom",
    "roberta", "electra", "albert", "distilbert", "bart", "mbart", "swin", "convnext", "clip", "qwen3", "phi",
    "longformer",
)  # fmt: skip


def _step(entry: Entry, batch: Batch) -> dict[str, Any]:
    torch.manual_seed(3)
    model = entry.build().double().train()
    torch.manual_seed(4)
    inputs = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in entry.inputs(SAMPLES).items()
    }
    names = [name for name in inputs if isinstance(inputs[name], torch.Tensor)]
    entered = batch(*(inputs[name] for name in names))
    inputs |= dict(zip(names, entered if len(names) > 1 else (entered,), strict=True))
    found = model(**inputs)
    found.loss.backward()
    return {"loss": found.loss.item(), "logits": found[1].detach(), **gradients(model)}


def zoo_programs() -> dict[str, Program]:
    """A step of each model: `labels=` inside, dropout as its configuration has it."""
    return {name: partial(_step, CATALOGUE[name]) for name in NAMES}
