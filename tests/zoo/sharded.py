"""A model of the catalogue as it trains with sharded parameters: AdamW on real ranks, beside one device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxdp
from fxdp.ir.tensor_difference import difference
from tests.capture.zoo import keep_float64
from tests.captures import KNOWN, captured_once
from tests.fallbacks import no_fallback
from tests.zoo.catalogue import CATALOGUE
from tests.zoo.public import WithLoss, inputs_of, own_inputs

STEPS = 20


@dataclass(frozen=True)
class Way:
    """A strategy on a form of mesh, with the splits of the batch that take turns."""

    axes: dict[str, int]
    splits: tuple[tuple[int, ...], ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def in_parts(self) -> bool:
        """Whether a step runs part by part: no rank draws what one device draws then, or has statistics."""
        return "pp" in self.axes or "pipeline" in self.options

    @property
    def ranks(self) -> int:
        """How many it takes."""
        count = 1
        for size in self.axes.values():
            count *= size
        return count


WAYS: dict[str, Way] = {
    "2 ranks": Way({"dp": 2}, ((3, 2), (2, 4))),
    "3 ranks": Way({"dp_shard": 3}, ((4, 0, 2), (1, 3, 2))),
    "4 ranks": Way({"dp_shard": 4}, ((2, 1, 2, 1), (3, 0, 1, 2))),
    "hybrid": Way({"dp_replicate": 2, "dp_shard": 2}, ((4, 0, 1, 2), (2, 2, 1, 1))),
    "micro-batches": Way({"dp": 2}, ((4, 3), (2, 5)), {"pipeline": {"microbatches": 2}}),
    "pipeline": Way({"pp": 2, "dp_shard": 2}, ((4, 3), (2, 4)), {"pipeline": {"microbatches": 2}}),
    "stages": Way({"pp": 2, "dp_shard": 2}, ((4, 3), (2, 4))),
    "optimizer": Way({"dp": 2}, ((3, 2), (4, 0)), {"strategy": "optimizer"}),
    "neighbours": Way({"dp_shard": 4}, ((2, 1, 2, 1), (3, 0, 1, 2)), {"reshard_after_forward": 2}),
    "inductor": Way({"dp": 2}, ((3, 2),), {"backend": "inductor"}),
    "kept": Way({"dp": 2}, ((3, 2), (0, 5)), {"reshard_after_forward": False}),
}


@dataclass
class Trained:
    """The largest relative errors of a training."""

    loss: float = 0.0
    parameters: float = 0.0
    """Of those and of buffers, after the last step."""
    change: float = 0.0
    """By how much the loss has changed: a model that learns nothing shows nothing."""


def train(name: str, way: str, steps: int = STEPS) -> Trained:
    """Train the model on this rank and, as one, on one device; float64, dropout as one device draws it.

    Where that cannot be, it is in evaluation mode. Its own casts to float32 are left out. Runs on each rank
    of a process group.
    """
    entry, chosen = CATALOGUE[name], WAYS[way]
    torch.manual_seed(0)
    model = WithLoss(entry.build().double()).train(not chosen.in_parts)
    rng = "sharded" if chosen.in_parts else "single-device"
    twin = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", tuple(chosen.axes.values()), mesh_dim_names=tuple(chosen.axes))
    options = {
        "strategy": "shard",
        "communication": {"bucket_cap_mb": 0.004},
        "backend": "eager",
        **chosen.options,
    }
    with _wide(name, twin), captured_once(KNOWN.setdefault(name, {})), no_fallback():
        compiled = fxdp.compile(model, mesh, batch_dims=entry.batch_dims, rng=rng, **options)
        optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (compiled, twin)]
        found, losses = Trained(), []
        for step in range(steps):
            split = chosen.splits[step % len(chosen.splits)]
            full = inputs_of(CATALOGUE[name], sum(split), seed=step)
            own = own_inputs(compiled, full, split, _data_rank(mesh))
            for module, inputs, optimizer in zip((compiled, twin), (own, full), optimizers, strict=True):
                torch.manual_seed(step)
                loss = module(**inputs)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            found.loss = max(found.loss, difference(*losses[-2:]))
    assert losses[-1].isfinite(), f"one device's loss is {losses[-1]}: nothing can be compared"
    found.change = float((losses[-1] - losses[1]).abs())
    found.parameters = max(_errors(compiled, twin))
    return found


def _data_rank(mesh: Any) -> int:
    """This rank's part of the batch: ranks that differ in their pipeline stage alone have the same."""
    names, found = mesh.mesh_dim_names, 0
    for axis, (name, place) in enumerate(zip(names, mesh.get_coordinate(), strict=True)):
        if name != "pp":
            found = found * mesh.size(axis) + place
    return found


@contextlib.contextmanager
def _wide(name: str, model: nn.Module) -> Iterator[None]:
    """Inside, what the model casts to float32 stays float64; of integers, too, if it is nan otherwise."""
    with keep_float64():
        torch.manual_seed(0)
        with torch.no_grad():
            finite = bool(copy.deepcopy(model)(**inputs_of(CATALOGUE[name], 5)).isfinite())
    with keep_float64(integers=not finite):
        yield


def _errors(compiled: nn.Module, twin: nn.Module) -> Iterator[float]:
    """Of all that the models hold; beside 1 %, as a value whose gradient is zero but for rounding drifts."""
    others: dict[str, Tensor] = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    own: dict[str, Tensor] = {**dict(compiled.named_parameters()), **dict(compiled.named_buffers())}
    assert own.keys() == others.keys()
    for name, value in own.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        yield difference(full.detach(), others[name].detach(), 1e-2)
