"""A family of timm is a module of its registry; the smallest is the one with the fewest parameters.

Where its class says how many blocks a stage has, there are two, and the row names that.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import timm
import torch
from torch import nn

from benchmarks.conformance.libraries.entries import (
    CLASSES,
    Families,
    Member,
    WithLoss,
    first_that_runs,
    parameters,
)
from tests.zoo.entry import Entry

SIDES = (64, 96, 128, 192)
"""Images are as small as a model takes; its own size comes last."""
TRIED = 3
"""So many of the smallest variants may fail in eager mode before a family counts as one that does not run."""
DEPTHS = ("depth", "depths", "layers", "num_blocks", "stage_depths")
"""Settings that say how many blocks there are."""
FEW = 2
"""Blocks in a stage: every second may be another kind."""
STAGES = 4
"""Of a model whose class has no default for their blocks."""


def families() -> Families:
    """All modules of the registry."""
    return {
        module: partial(_smallest, module)
        for module in timm.list_modules()
        if timm.list_models(module=module)
    }


def _smallest(module: str) -> Member:
    listed = timm.list_models(module=module)
    sized = []
    for name in [name for name in listed if name.startswith("test_")] or listed:  # made to be small
        with suppress(Exception):
            sized.append((parameters(partial(timm.create_model, name)), name))
    names = [name for _, name in sorted(sized)] or listed
    return first_that_runs(entry for name in names[:TRIED] for entry in _entries(name))


def _entries(name: str) -> Iterator[tuple[str, Entry]]:
    """The model at growing sizes of its image, first with few blocks."""
    own = timm.get_pretrained_cfg(name).input_size[-1]
    few = _few_blocks(name)
    for side in [s for s in SIDES if s < own] + [own]:
        for blocks in (few, {}) if few else ({},):
            said = "".join(f", {key}={value}" for key, value in blocks.items())
            for sizes in ({"img_size": side}, {}):
                build = partial(_build, name, {**sizes, **blocks})
                yield f"{name}@{side}{said}", Entry(build, partial(_inputs, side))


def _few_blocks(name: str) -> dict[str, Any]:
    """How many blocks the model has, by the setting of its class that says it, where it may have less."""
    if name.startswith("test_"):
        return {}
    with suppress(Exception), torch.device("meta"):
        made = inspect.signature(type(timm.create_model(name))).parameters
        return {key: _few(made[key].default) for key in DEPTHS if key in made}
    return {}


def _few(blocks: Any) -> Any:
    if isinstance(blocks, (tuple, list)):
        return type(blocks)(map(_few, blocks))
    return min(blocks, FEW) if isinstance(blocks, int) else (FEW,) * STAGES


def _build(name: str, sizes: dict[str, Any]) -> nn.Module:
    return WithLoss(timm.create_model(name, num_classes=CLASSES, **sizes))


def _inputs(side: int, batch: int) -> dict[str, Any]:
    return {"x": torch.randn(batch, 3, side, side), "target": torch.randint(0, CLASSES, (batch,))}
