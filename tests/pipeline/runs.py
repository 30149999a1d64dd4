"""What a rank does in the tests of pipelines: train both models and compare everything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxdp
from fxdp.capture.captured import Captured
from fxdp.capture.driver import capture_request
from fxdp.capture.request import Request
from fxdp.ir.graphs import copy_graph
from tests.capture import zoo
from tests.exactness.models import step_both, twin_of
from tests.pipeline import models

_KNOWN: dict[str, dict[Any, Captured]] = {}
"""What this rank has captured of each model, in earlier tests, too."""


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
    compute: str = "eager"
    checkpoint: str = "never"


def error_of(run: Run, mesh: DeviceMesh | None = None) -> float:
    """The rank's worst relative error of outputs, gradients and buffers over all calls."""
    if mesh is None and dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (run.pp, run.dp), mesh_dim_names=("pp", "dp"))
    model = models.build(run.model)
    twin = twin_of(model)
    options = {k: v for k, v in asdict(run).items() if k not in ("model", "pp", "dp", "batches")}
    worst = 0.0
    with zoo.keep_float64() if run.model in zoo.ZOO else contextlib.nullcontext():
        compiled = fxdp.compile(model, mesh, **options)
        place = compiled.mesh.rank
        for split in run.batches:
            whole = models.inputs(run.model, sum(split))
            worst = max(worst, step_both(compiled, twin, ((), whole), None, split, place))
    return worst


def errors_of(runs: tuple[Run, ...]) -> list[float]:
    """The same for several runs, captured once per model: what follows depends on the run."""
    found = []
    for run in runs:
        with captured_once(_KNOWN.setdefault(run.model, {})):
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


@contextlib.contextmanager
def captured_once(known: dict[Any, Captured] | None = None) -> Iterator[None]:
    """Models of the same class are captured once in each mode; all after the capture is done every time.

    `known` holds what was captured before, on meshes of any size: a capture is of the global batch.
    """
    known = {} if known is None else known

    def remembered(request: Request) -> Captured:
        modes = (request.module.training, torch.is_grad_enabled())
        key = (type(request.module), *modes, request.joint.couple, request.dynamic, request.hint)
        if key not in known:
            known[key] = capture_request(request)
        return replace(known[key], gm=copy_graph(known[key].gm))

    with mock.patch("fxdp.module.programs.capture_request", remembered):
        yield
