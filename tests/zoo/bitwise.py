"""A training of a model of the catalogue with `fxdp.Bitwise`, as hashes of all its numbers."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxdp
from tests.captures import KNOWN, captured_once
from tests.zoo.bitwise_subjects import subject

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
    cut: int | None = None
    """The stages that Inductor compiles on any mesh."""


@dataclass(frozen=True)
class Training:
    """A model, the samples of each rank, and the options of `compile` that leave the bits alone."""

    name: str
    parts: tuple[int, ...]
    mode: Mode = field(default_factory=Mode)
    options: dict[str, Any] = field(default_factory=dict)
    stages: int = 1
    """Pipeline ranks, of which each group trains on the samples of one entry of `parts`."""

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.stages * len(self.parts)


def learn(training: Training) -> None:
    """Capture the model of a training once, where ranks are forked from."""
    with _Run(training) as run:
        run.step(0)


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
        self._subject = subject(training.name)
        axes, shape = ("pp", "dp"), (training.stages, len(training.parts))
        self._mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes) if training.stages > 1 else None
        self._rank = dist.get_rank() % len(training.parts) if dist.is_initialized() else 0
        key = training.name, training.mode.autocast
        for other in KNOWN.keys() - {key}:
            del KNOWN[other]  # captures of another model
        self._once = captured_once(KNOWN.setdefault(key, {}))

    def __enter__(self) -> _Run:
        torch.manual_seed(0)
        self._once.__enter__()
        self._model = self._subject.model().train()
        self._compiled = fxdp.compile(
            self._model, self._mesh, numerics=fxdp.Bitwise(block=BLOCK), backend=self._mode.backend,
            batch_dims=self._subject.batch_dims, pipeline={"stages": self._mode.cut},
            **self._training.options,
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
        """Return a digest of losses, norms and gradients of the step."""
        found: list[Tensor] = []
        for phase, names in (self._subject.phases or {"": None}).items():
            for call in range(self._mode.accumulate):
                found.append(self._loss(names, step + call * STEPS))
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                found[-1].backward()
            trained = set(self._model.get_submodule(phase).parameters())
            for parameter in set(self._compiled.parameters()) - trained:
                parameter.grad = None
            found.append(torch.nn.utils.clip_grad_norm_(self._compiled.parameters(), 1.0))
            found += [p.grad for p in self._compiled.parameters() if p.grad is not None]
            self._optimizer.step()
            self._optimizer.zero_grad()
        return _digest(found)

    def state(self) -> str:
        """Return a digest of parameters, buffers and the optimizer."""
        values = [*self._compiled.parameters(), *self._compiled.buffers()]
        return _digest([*values, *_states(self._optimizer)])

    def _loss(self, names: Sequence[str] | None, seed: int) -> Tensor:
        own = self._subject.inputs(self._compiled, self._training.parts, self._rank, seed)
        own = own if names is None else {name: own[name] for name in names}
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._mode.autocast):
            return self._compiled(**own)  # type: ignore[no-any-return]


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
