"""The ways of training a GPT in stages that `pipeline.py` compares; each makes gradients, none updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

import fxdp
from benchmarks.harness.models import Case, UntiedGPT, next_token_loss

CPU = torch.device("cpu")
Step = Callable[[Tensor, Tensor], "Tensor | None"]

TORCH_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}  # fmt: skip
SCHEDULES = ("dp", *TORCH_SCHEDULES)
KINDS = ("eager", "compiled")
_SEVERAL = ("interleaved", "zero-bubble")
"""Schedules that torch gives a list of stages."""
_EAGER_ONLY = "zero-bubble"
"""Torch's: it refuses stages that are compiled."""


@dataclass(frozen=True, order=True)
class Name:
    """One way: by whom, in which schedule (`dp`: no stages), eager or compiled, in how many micro-batches."""

    by: str
    schedule: str
    kind: str
    microbatches: int = 1

    def __str__(self) -> str:
        parts = f", {self.microbatches} micro-batches" if self.microbatches > 1 else ""
        return f"{self.by} {self.schedule} {self.kind}{parts}"


@dataclass
class Contender:
    """One way at work on this rank: its step takes the global batch, its gradients are in `model`."""

    name: Name
    model: nn.Module
    run: Step
    compiled: Any = None

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor | None:
        """Forward and backward; the loss where this rank has it."""
        for parameter in self.model.parameters():
            parameter.grad = None
        return self.run(tokens, targets)

    def gradients(self) -> dict[str, Tensor]:
        """Those that this rank has."""
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


class Stage(nn.Module):
    """A range of the model's blocks."""

    def __init__(self, model: UntiedGPT, begin: int, end: int) -> None:
        super().__init__()
        self.model = model
        self.begin, self.end = begin, end

    def forward(self, x: Tensor) -> Tensor:
        return self.model.part(x, self.begin, self.end)


def stages_each(schedule: str) -> int:
    """How many a rank has."""
    return 2 if schedule == "interleaved" else 1


def names(microbatches: Sequence[int], schedules: Sequence[str], kinds: Sequence[str]) -> list[Name]:
    """All ways."""
    both = ("torch", "fxdp")
    found = [Name(by, "dp", kind) for kind in kinds for by in both if "dp" in schedules]
    staged = [schedule for schedule in schedules if schedule != "dp"]
    for count in microbatches:
        for kind in kinds:
            branches = [Name(by, schedule, kind, count) for by in both for schedule in staged]
            found += [n for n in branches if (n.by, n.schedule, kind) != ("torch", _EAGER_ONLY, "compiled")]
    return found


def make(wanted: Sequence[Name], case: Case) -> list[Contender]:
    """All contenders; torch's schedules of one kind and count share a model, whose code is compiled once."""
    stages: dict[tuple[str, int, int], list[nn.Module]] = {}
    return [_make(name, case, stages) for name in wanted]


def _make(name: Name, case: Case, stages: dict[tuple[str, int, int], list[nn.Module]]) -> Contender:
    each = stages_each(name.schedule)
    if name.by == "torch" and name.schedule != "dp":
        key = (name.kind, name.microbatches, each)
        if key not in stages:
            stages[key] = _own_stages(case, each, compiled=name.kind == "compiled")
        return _torch_pipeline(name, stages[key])
    model = _model(case)
    if name.by == "torch":
        parallel: Any = DistributedDataParallel(model)
        parallel = torch.compile(parallel, dynamic=False) if name.kind == "compiled" else parallel
        return Contender(name, model, partial(_train_part, parallel))
    backend = "inductor" if name.kind == "compiled" else "eager"
    if name.schedule == "dp":
        compiled = fxdp.compile(model, backend=backend)
        return Contender(name, model, partial(_train_part, compiled), compiled)
    ranks = dist.get_world_size()
    compiled = fxdp.compile(
        model,
        init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",)),
        pipeline={
            "stages": [f"blocks.{cut}" for cut in cuts(case, ranks * each)],
            "microbatches": name.microbatches,
            "schedule": name.schedule,
            "gradients": "owner",  # as torch's pipelines, which leave each rank its own stages'
        },
        backend=backend,
    )
    return Contender(name, model, partial(_train, compiled), compiled)


def _model(case: Case) -> UntiedGPT:
    model = case.model(CPU)
    assert isinstance(model, UntiedGPT)
    return model


def cuts(case: Case, stages: int) -> list[int]:
    """The blocks at which stages begin, but for the first."""
    blocks = len(_model(case).blocks)
    return [blocks * stage // stages for stage in range(1, stages)]


def _own_stages(case: Case, each: int, *, compiled: bool) -> list[nn.Module]:
    """This rank's stages of one model, sharded in turns."""
    model, rank, ranks = _model(case), dist.get_rank(), dist.get_world_size()
    ends = [0, *cuts(case, ranks * each), len(model.blocks)]
    own = [Stage(model, *ends[place : place + 2]) for place in range(rank, ranks * each, ranks)]
    return [torch.compile(stage, dynamic=False) for stage in own] if compiled else [*own]  # type: ignore[misc]


def _torch_pipeline(name: Name, own: list[nn.Module]) -> Contender:
    # dividing each micro-batch's loss costs less than scale_grads, which divides every gradient
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(logits, targets) / name.microbatches

    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = [
        PipelineStage(stage, rank + ranks * i, ranks * len(own), CPU) for i, stage in enumerate(own)
    ]  # fmt: skip
    given = stages if name.schedule in _SEVERAL else stages[0]
    schedule = TORCH_SCHEDULES[name.schedule](given, name.microbatches, loss_fn=loss, scale_grads=False)

    def run(tokens: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        if rank == ranks - 1:
            schedule.step(target=targets, losses=losses)
            return torch.stack([part.detach() for part in losses]).sum()
        schedule.step(*[tokens][: rank == 0])
        return None

    full = getattr(own[0], "_orig_mod", own[0]).model
    return Contender(name, full, run)


def _train(loss: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    found: Tensor = loss(tokens, targets)
    found.backward()
    return found.detach()


def _train_part(loss: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = len(tokens) // ranks
    return _train(loss, tokens[rank * size : (rank + 1) * size], targets[rank * size : (rank + 1) * size])
