"""What a rank does in the tests of pipelines: train both models and compare everything."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fxdp
from tests.capture import zoo
from tests.exactness.models import step_both, twin_of
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
    compute: str = "eager"
    checkpoint: str = "never"


def error_of(run: Run) -> float:
    """The rank's worst relative error of outputs, gradients and buffers over all calls."""
    mesh = None
    if dist.get_world_size() > 1:
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
    """The same for several runs."""
    return [error_of(run) for run in runs]
