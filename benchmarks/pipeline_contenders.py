"""The ways of training a GPT on two ranks that `pipeline.py` compares; each makes gradients, none updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from models import Case, UntiedGPT, next_token_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import fxdp

CPU = torch.device("cpu")
Step = Callable[[Tensor, Tensor], "Tensor | None"]

TORCH_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
FXDP_SCHEDULES = ("gpipe", "1f1b", "zero-bubble")
KINDS = ("eager", "compiled")


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
    """One rank's half of the model."""

    def __init__(self, model: UntiedGPT, rank: int, cut: int) -> None:
        super().__init__()
        self.model = model
        self.begin, self.end = (0, cut) if rank == 0 else (cut, len(model.blocks))

    def forward(self, x: Tensor) -> Tensor:
        return self.model.part(x, self.begin, self.end)


def names(microbatches: Sequence[int]) -> list[Name]:
    """All ways."""
    found = [Name(by, "dp", kind) for kind in KINDS for by in ("torch", "fxdp")]
    for count in microbatches:
        for kind in KINDS:
            found += [Name("torch", schedule, kind, count) for schedule in TORCH_SCHEDULES]
            found += [Name("fxdp", schedule, kind, count) for schedule in FXDP_SCHEDULES]
    return found


def make(wanted: Sequence[Name], case: Case) -> list[Contender]:
    """All contenders; torch's schedules of one kind and count share a model, whose code is compiled once."""
    stages: dict[tuple[str, int], nn.Module] = {}
    return [_make(name, case, stages) for name in wanted]


def _make(name: Name, case: Case, stages: dict[tuple[str, int], nn.Module]) -> Contender:
    if name.by == "torch" and name.schedule != "dp":
        key = (name.kind, name.microbatches)
        if key not in stages:
            stage = Stage(_model(case), dist.get_rank(), cut(case))
            stages[key] = torch.compile(stage, dynamic=False) if name.kind == "compiled" else stage  # type: ignore[assignment]
        return _torch_pipeline(name, stages[key])
    model = _model(case)
    if name.by == "torch":
        parallel: Any = DistributedDataParallel(model)
        parallel = torch.compile(parallel, dynamic=False) if name.kind == "compiled" else parallel
        return Contender(name, model, partial(_train_part, parallel))
    compute = "inductor" if name.kind == "compiled" else "eager"
    if name.schedule == "dp":
        compiled = fxdp.compile(model, compute=compute)
        return Contender(name, model, partial(_train_part, compiled), compiled)
    compiled = fxdp.compile(
        model,
        init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)),
        stages=[f"blocks.{cut(case)}"],
        microbatches=name.microbatches,
        schedule=name.schedule,
        compute=compute,
        gradients="owner",  # as torch's pipelines, which leave each rank its own stage's
    )
    return Contender(name, model, partial(_train, compiled), compiled)


def _model(case: Case) -> UntiedGPT:
    model = case.model(CPU)
    assert isinstance(model, UntiedGPT)
    return model


def cut(case: Case) -> int:
    """The block at which the second stage begins."""
    return len(_model(case).blocks) // 2


def _torch_pipeline(name: Name, stage: nn.Module) -> Contender:
    # dividing each micro-batch's loss costs less than scale_grads, which divides every gradient
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(logits, targets) / name.microbatches

    schedule = TORCH_SCHEDULES[name.schedule](
        PipelineStage(stage, dist.get_rank(), 2, CPU), name.microbatches, loss_fn=loss, scale_grads=False
    )

    def run(tokens: Tensor, targets: Tensor) -> Tensor | None:
        if dist.get_rank() == 0:
            schedule.step(tokens)
            return None
        losses: list[Tensor] = []
        schedule.step(target=targets, losses=losses)
        return torch.stack([part.detach() for part in losses]).sum()

    whole = getattr(stage, "_orig_mod", stage).model
    return Contender(name, whole, run)


def _train(loss: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    found: Tensor = loss(tokens, targets)
    found.backward()
    return found.detach()


def _train_part(loss: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = len(tokens) // ranks
    return _train(loss, tokens[rank * size : (rank + 1) * size], targets[rank * size : (rank + 1) * size])
