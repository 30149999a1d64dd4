"""What a rank does in the tests of pipelines: train both models and compare everything."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxdp
from tests.capture import zoo
from tests.captures import KNOWN, capture_ahead, captured_once
from tests.exactness.models import counterpart_of, step_both
from tests.pipeline import models


@dataclass(frozen=True)
class Run:
    """One configuration: a model over `pp x dp` ranks."""

    model: str
    pp: int
    dp: int = 1
    schedule: str = "1f1b"
    microbatches: int = 2
    stages: Any = None
    batches: tuple[tuple[int, ...], ...] = ((8,),)
    """The local batch of each data rank, call by call."""
    backend: str = "eager"
    checkpoint: str = "never"


def _patches(model: str) -> contextlib.AbstractContextManager[None]:
    return zoo.keep_float64() if model in zoo.ZOO else contextlib.nullcontext()


def _name(model: str) -> Any:
    """By which ranks know it: transformers as tests/exactness/test_zoo_gloo.py has named them."""
    return (model, True) if model in zoo.ZOO else model


def know(names: tuple[str, ...]) -> None:
    """Capture these models, for `RankPool.prepare`: what follows a capture depends on the run."""
    for name in names:
        with _patches(name):
            inputs = models.inputs(name, 8)
            capture_ahead(
                _name(name), models.build(name), (), inputs, {"pp": 2}, pipeline={"microbatches": 2}
            )


def error_of(run: Run, mesh: DeviceMesh | None = None) -> float:
    """The rank's worst relative error of outputs, gradients and buffers over all calls."""
    if mesh is None and dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (run.pp, run.dp), mesh_dim_names=("pp", "dp"))
    model = models.build(run.model)
    twin = counterpart_of(model)
    pipeline = {"schedule": run.schedule, "microbatches": run.microbatches, "stages": run.stages}
    worst = 0.0
    with _patches(run.model):
        compiled = fxdp.compile(
            model, mesh, pipeline=pipeline, activation_checkpointing=run.checkpoint, backend=run.backend
        )
        place = compiled.mesh.rank
        for split in run.batches:
            full = models.inputs(run.model, sum(split))
            worst = max(worst, step_both(compiled, twin, ((), full), None, split, place))
    return worst


def errors_of(runs: tuple[Run, ...]) -> list[float]:
    """The same for several runs, captured once per model, by earlier tests or by `know`."""
    found = []
    for run in runs:
        with captured_once(KNOWN.setdefault(_name(run.model), {})):
            found.append(error_of(run))
    return found


def outcomes_of(runs: tuple[Run, ...]) -> list[float | str]:
    """The same for several runs on one mesh, captured once per model; where one fails, its error's text."""
    found: list[float | str] = []
    mesh = init_device_mesh("cpu", (runs[0].pp, runs[0].dp), mesh_dim_names=("pp", "dp"))
    with captured_once():
        for run in runs:
            try:
                found.append(error_of(run, mesh))
            except fxdp.StageError as error:  # all ranks raise it before anything is sent
                found.append(f"{type(error).__name__}: {error}")
    return found
