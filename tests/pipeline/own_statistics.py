"""BatchNorm by the statistics of each part of the batch: compiled, and spelled out on one device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxdp
from fxdp.pipeline.write.microbatches import _even_bounds
from tests.captures import KNOWN, captured_once
from tests.exactness.models import counterpart_of, step_both

_Norm = nn.modules.batchnorm._BatchNorm


class Net(nn.Module):
    """Norms of images and of rows, one without weights, one without running statistics."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.images = nn.BatchNorm2d(4, momentum=momentum)
        self.middle = nn.Linear(4, 6)
        self.rows = nn.BatchNorm1d(6, momentum=momentum, affine=False)
        self.last = nn.BatchNorm1d(6, track_running_stats=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.images(self.conv(x))).mean((2, 3))
        hidden = self.rows(self.middle(hidden)).tanh()
        logits = self.head(self.last(hidden + hidden.square()))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


@dataclass(frozen=True)
class Run:
    """One configuration over `pp x dp` ranks."""

    microbatches: int
    pp: int = 1
    dp: int = 1
    batches: tuple[tuple[int, ...], ...] = ((8,),)
    """The local batch of each data rank, call by call."""
    momentum: float | None = 0.1
    schedule: str = "1f1b"
    checkpoint: str = "never"


def parts_of(split: Sequence[int], microbatches: int) -> list[int]:
    """The sizes of all micro-batches of all ranks, in the order of the samples."""
    return [size for batch in split for _, size in _even_bounds(batch, microbatches)]


def by_parts(norm: _Norm, sizes: list[int], x: Tensor) -> Tensor:
    """Each part by its own mean and variance; the running statistics by those of all of `x`."""
    with torch.no_grad():
        type(norm).forward(norm, x)
    dims = [0, *range(2, x.dim())]
    wide = [1, -1] + [1] * (x.dim() - 2)
    normed = []
    for part in x.split(sizes):
        if len(part):
            apart = part - part.mean(dims, keepdim=True)
            part = apart / (apart.square().mean(dims, keepdim=True) + norm.eps).sqrt()
        normed.append(part)
    full = torch.cat(normed)
    return full * norm.weight.view(wide) + norm.bias.view(wide) if norm.affine else full


def set_parts(model: nn.Module, sizes: list[int]) -> None:
    """Let every BatchNorm of an eager model treat the parts apart."""
    for module in model.modules():
        if isinstance(module, _Norm):
            module.forward = functools.partial(by_parts, module, sizes)  # type: ignore[method-assign]


def inputs(batch: int) -> dict[str, Tensor]:
    """A global batch, the same on all ranks."""
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, 2, 4, 4, generator=generator, dtype=torch.float64)
    return {"x": x + 3, "y": torch.randint(0, 3, (batch,), generator=generator)}


def error_of(run: Run) -> float:
    """The rank's worst relative error of outputs, gradients and buffers over all calls."""
    mesh = None
    if run.pp * run.dp > 1:
        assert dist.get_world_size() == run.pp * run.dp
        mesh = init_device_mesh("cpu", (run.pp, run.dp), mesh_dim_names=("pp", "dp"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net(run.momentum).double()
    twin = counterpart_of(model)
    pipeline = {"batch_stats": "microbatch", "microbatches": run.microbatches, "schedule": run.schedule}
    compiled = fxdp.compile(
        model, mesh, pipeline=pipeline, activation_checkpointing=run.checkpoint, backend="eager"
    )
    worst = 0.0
    for split in run.batches:
        set_parts(twin, parts_of(split, run.microbatches))
        full: Any = ((), inputs(sum(split)))
        worst = max(worst, step_both(compiled, twin, full, None, split, compiled.mesh.rank))
    return worst


def errors_of(runs: tuple[Run, ...]) -> list[float]:
    """The same for several runs, captured once for each kind of model."""
    found = []
    for run in runs:
        with captured_once(KNOWN.setdefault((__name__, run.momentum), {})):
            found.append(error_of(run))
    return found
