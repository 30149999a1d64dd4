"""A model of the zoo as a user trains it: the public API, real ranks, Inductor, batches that change."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxdp
from fxdp.ir.tensor_difference import difference
from fxdp.module.calls.reader import CallReader
from tests.exactness.models import gradient_errors, part
from tests.fallbacks import no_fallback
from tests.zoo.entry import Entry

SPLITS = ((3, 2), (2, 4))
"""Uneven; the second is served by the size-generic program."""


class WithLoss(nn.Module):
    """A model and its loss, or the mean square of what it returns where it has none."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        found = self.model(**inputs)
        loss = found.get("loss") if hasattr(found, "get") else getattr(found, "loss", None)
        if isinstance(loss, Tensor):
            return loss.mean()
        values = [v for v in pytree.tree_leaves(found) if isinstance(v, Tensor) and v.is_floating_point()]
        scalars = [value for value in values if value.dim() == 0]
        return scalars[0] if scalars else torch.stack([v.square().mean() for v in values[:3]]).sum()


def public_error(entry: Entry, backend: str = "inductor", splits: Sequence[Sequence[int]] = SPLITS) -> float:
    """The largest relative error of loss, gradients and buffers of this rank, beside one eager device.

    Dropout draws one device's numbers. Runs on each rank of a process group.
    What Inductor cannot compile fails.
    """
    torch.manual_seed(0)
    model = WithLoss(entry.build().double()).train()
    twin = copy.deepcopy(model)
    compiled = fxdp.compile(model, batch_dims=entry.batch_dims, rng="single-device", backend=backend)
    with no_fallback():
        return max(_step(compiled, twin, inputs_of(entry, sum(split)), split) for split in splits)


def inputs_of(entry: Entry, batch: int, seed: int = 1) -> dict[str, Any]:
    """A batch of a model of the zoo, in float64."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return entry.inputs(batch)
    finally:
        torch.set_default_dtype(before)


def _step(compiled: Any, twin: nn.Module, full: dict[str, Any], split: Sequence[int]) -> float:
    own = own_inputs(compiled, full, split, dist.get_rank())
    losses = []
    for module, inputs in ((compiled, own), (twin, full)):
        module.zero_grad()
        torch.manual_seed(2)
        loss = module(**inputs)
        loss.backward()
        losses.append(loss.detach())
    assert not losses[1].isnan(), "one device's own loss is no number, which any such equals"
    errors = [difference(*losses), *gradient_errors(compiled, twin)]
    for (_, got), (_, expected) in zip(compiled.named_buffers(), twin.named_buffers(), strict=True):
        errors.append(difference(got, expected, 1e-6))  # means that cancel are zero but for rounding
    return max(errors)


def own_inputs(compiled: Any, full: dict[str, Any], split: Sequence[int], rank: int) -> dict[str, Any]:
    """A rank's part of each tensor that has a batch dim; all else as it is."""
    reader = CallReader(compiled._model, compiled._options.batch_dims, "cpu")
    dims = iter(reader.read((), full).batch_dims)

    def own(leaf: Any) -> Any:
        dim = next(dims) if isinstance(leaf, Tensor) else None
        if dim is None:
            return leaf
        inner = leaf.shape[dim] // sum(split)
        return part(leaf, [n * inner for n in split], rank, dim).clone()

    return pytree.tree_map(own, full)  # type: ignore[no-any-return]
