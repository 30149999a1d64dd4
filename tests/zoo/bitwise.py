"""A training of a model of the catalogue with `fxdp.Bitwise`, as hashes of all its numbers."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import fxdp
from tests.captures import KNOWN, captured_once
from tests.zoo.catalogue import CATALOGUE
from tests.zoo.public import WithLoss, inputs_of, own_inputs

STEPS, BLOCK = 20, 2
SAVED = 3
"""Steps from one checkpoint to the next in a training in which a rank is killed."""


@dataclass(frozen=True)
class Mode:
    """What decides the bits of a training, on one device as on many."""

    backend: str = "eager"
    autocast: bool = False
    """Compute in bfloat16."""
    accumulate: int = 1
    """Calls of backward before each step."""


@dataclass(frozen=True)
class Training:
    """A model, the samples of each rank, and the options of `compile` that leave the bits alone."""

    name: str
    parts: tuple[int, ...]
    mode: Mode = field(default_factory=Mode)
    options: dict[str, Any] = field(default_factory=dict)


def curve(training: Training, steps: range, folder: str) -> list[str]:
    """Return a digest of each step's numbers, and one of parameters and optimizer, on this rank of a group.

    Steps that do not begin at 0 go on from the checkpoint in the folder; those that end early leave one.
    """
    with _Run(training) as run:
        if steps.start:
            assert run.load(folder) == steps.start
        found = [run.step(step) for step in steps]
        if steps.stop < STEPS:
            run.save(folder, steps.stop)
            return found
        return [*found, run.state()]


def killed_in(training: Training, rank: int, step: int, folder: str) -> None:
    """Train with checkpoints; the rank kills itself between the forward and the backward of the step."""
    with _Run(training) as run:
        for done in range(STEPS):
            if done and done % SAVED == 0:
                run.save(folder, done)
            run.step(done, kill=done == step and dist.get_rank() == rank)


def resumed(training: Training, folder: str) -> tuple[int, list[str]]:
    """Return the step of the checkpoint, or 0 without one, and what `curve` returns from there on."""
    with _Run(training) as run:
        start = run.load(folder) if Path(folder).exists() else 0
        return start, [*(run.step(step) for step in range(start, STEPS)), run.state()]


class _Run:
    """A compiled model with its optimizer, of which equal models are captured once."""

    def __init__(self, training: Training) -> None:
        self._training, self._mode = training, training.mode
        self._entry, key = CATALOGUE[training.name], (training.name, training.mode.autocast)
        for other in KNOWN.keys() - {key}:
            del KNOWN[other]  # captures of another model
        self._once = captured_once(KNOWN.setdefault(key, {}))

    def __enter__(self) -> _Run:
        torch.manual_seed(0)
        self._once.__enter__()
        self._compiled = fxdp.compile(
            WithLoss(self._entry.build()).train(), numerics=fxdp.Bitwise(block=BLOCK),
            backend=self._mode.backend, batch_dims=self._entry.batch_dims, **self._training.options,
        )  # fmt: skip
        self._optimizer = torch.optim.AdamW(self._compiled.parameters(), 1e-3)
        return self

    def __exit__(self, *error: Any) -> None:
        self._once.__exit__(*error)

    def load(self, folder: str) -> int:
        return fxdp.load(folder, self._compiled, self._optimizer)

    def save(self, folder: str, step: int) -> None:
        fxdp.save(folder, self._compiled, self._optimizer, step=step)

    def step(self, step: int, *, kill: bool = False) -> str:
        """Return a digest of losses, the norm and gradients of the step."""
        losses = []
        for call in range(self._mode.accumulate):
            losses.append(self._loss(step + call * STEPS))
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            losses[-1].backward()
        norm = torch.nn.utils.clip_grad_norm_(self._compiled.parameters(), 1.0)
        gradients = (p.grad for p in self._compiled.parameters() if p.grad is not None)
        found = _digest([*losses, norm, *gradients])
        self._optimizer.step()
        self._optimizer.zero_grad()
        return found

    def state(self) -> str:
        """Return a digest of parameters, buffers and the optimizer."""
        values = [*self._compiled.parameters(), *self._compiled.buffers()]
        return _digest([*values, *_states(self._optimizer)])

    def _loss(self, seed: int) -> Tensor:
        parts, rank = self._training.parts, dist.get_rank()
        dtype = next(self._compiled.parameters()).dtype
        inputs = _of_dtype(inputs_of(self._entry, sum(parts), seed=seed), dtype)
        own = own_inputs(self._compiled, inputs, parts, rank)
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._mode.autocast):
            return self._compiled(**own)  # type: ignore[no-any-return]


def _of_dtype(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return inputs whose floating-point numbers have the model's dtype."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)  # type: ignore[no-any-return]


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            yield from (state[key] for key in sorted(state))


def _digest(values: list[Tensor]) -> str:
    found = hashlib.sha256()
    for value in values:
        full = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(full.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
