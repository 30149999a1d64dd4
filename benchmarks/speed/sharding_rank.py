"""What one rank of `sharding.py` measures: all variants in turns, or one's first step from a cold cache."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fxdp
from benchmarks.harness.models import CASES, Case
from benchmarks.speed.sharding_count import Traffic, own_memory, plain_copies
from tests.held_memory import bytes_of

BUCKET_MB = 4
BASELINE = "fsdp2-compile"
SHARDED = "fxdp-shard"
FULL = "fxdp-replicate"


def _fsdp2(model: nn.Module, mesh: Any) -> Any:
    """A group per block, as FSDP2's own examples have it, and one for the rest."""
    for parent in model.modules():
        for block in parent if isinstance(parent, (nn.ModuleList, nn.Sequential)) else ():
            own = next(block.parameters(), None)
            if own is not None and not isinstance(own, DTensor):  # what lies in a group is in no other
                fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


VARIANTS: dict[str, Any] = {
    "fsdp2": _fsdp2,
    BASELINE: lambda model, mesh: torch.compile(_fsdp2(model, mesh)),
    FULL: lambda model, mesh: fxdp.compile(model, mesh),
    SHARDED: lambda model, mesh: fxdp.compile(
        model, mesh, strategy="shard", communication={"bucket_cap_mb": BUCKET_MB}
    ),
}


class _Trainer:
    """One variant at work on this rank."""

    def __init__(self, variant: str, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        self.model: nn.Module = case.model(torch.device("cpu"))
        self.full = sum(p.numel() for p in self.model.parameters())
        self.loss = VARIANTS[variant](self.model, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def batch(self, number: int) -> list[Tensor]:
        """This rank's part of a step's batch."""
        rank, size = dist.get_rank(), self.case.local_batch
        full = self.case.batch(number, dist.get_world_size())
        return [part[rank * size : (rank + 1) * size] for part in full]

    def step(self, number: int) -> dict[str, float]:
        """Seconds, CPU seconds, the optimizer's, and the loss of a step that all ranks begin together."""
        batch = self.batch(number)
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        loss = self.loss(*batch)
        loss.backward()
        before = time.perf_counter()
        self.optimizer.step()
        after = time.perf_counter()
        self.optimizer.zero_grad()
        end, cpu = time.perf_counter(), time.process_time() - cpu
        return {"wall": end - start, "cpu": cpu, "optimizer": after - before, "loss": loss.item()}

    def held(self) -> dict[str, int]:
        """Bytes on this rank after a backward: of parameters, gradients and the optimizer's state."""
        self.loss(*self.batch(0)).backward()
        parameters = list(self.model.parameters())
        gradients = bytes_of(p.grad for p in parameters if p.grad is not None)
        states = [v for each in self.optimizer.state.values() for v in each.values() if isinstance(v, Tensor)]
        self.optimizer.zero_grad()
        return {"parameters": bytes_of(parameters), "gradients": gradients, "state": bytes_of(states)}

    def traffic(self) -> dict[str, Any]:
        """What a step sends, counted, and what the plan says of it."""
        batch = self.batch(0)
        with Traffic() as traffic:
            self.loss(*batch).backward()
        self.optimizer.zero_grad()
        printed = self.loss.plan.collectives()
        return {
            "printed": sum(row.bytes for row in printed),
            "counted": traffic.sent,
            "calls": len(traffic.calls),
            "kinds": {kind: traffic.of(kind) for kind, _ in traffic.calls},
            "buckets": traffic.most_buckets,
            "bytes": traffic.most_bytes,
            "bucket": traffic.largest_gather,
        }


class _SameStep:
    """An optimizer's step on a sharded model, on plain tensors of the same rows and gradients, and on one.

    That on all elements as one tensor is the floor: no step can take less.
    The gradients are random: those of a deep model vanish, and numbers below the least normal one take the
    processor a hundred times as long as others, whoever steps. The learning rate is 0, so nothing changes.
    """

    def __init__(self, trainer: _Trainer) -> None:
        self._trainer = trainer
        self._sharded = list(trainer.model.parameters())
        self._plain = plain_copies(self._sharded)
        flat = nn.Parameter(torch.cat([p.detach().flatten() for p in self._plain]))
        flat.grad = torch.randn_like(flat)
        for p, rows in zip(self._plain, flat.grad.split([p.numel() for p in self._plain]), strict=True):
            p.grad = rows.view(p.shape)
        all_three = self._sharded, self._plain, [flat]
        self._optimizers = [torch.optim.AdamW(own, lr=0.0, fused=True) for own in all_three]

    def seconds(self, number: int) -> list[float]:
        """Of all three, on what a backward leaves: in its memory, and with its caches."""
        trainer, found = self._trainer, []
        for optimizer in self._optimizers:
            trainer.loss(*trainer.batch(number)).backward()
            for sharded, plain in zip(self._sharded, self._plain, strict=True):
                assert sharded.grad is not None
                assert plain.grad is not None
                own_memory(sharded.grad).copy_(plain.grad)
            dist.barrier()
            start = time.perf_counter()
            optimizer.step()
            found.append(time.perf_counter() - start)
            trainer.optimizer.zero_grad()
        return found


def _rounds(asked: dict[str, Any]) -> dict[str, Any]:
    """All variants in turns; a step is as long as it is on the slowest rank."""
    case, trainers = CASES[asked["model"]], {}
    found: dict[str, Any] = {}
    for variant in asked["variants"]:
        trainers[variant] = trainer = _Trainer(variant, case)
        losses = [trainer.step(number)["loss"] for number in range(4)]
        found[variant] = {"losses": losses, **trainer.held(), "numel": trainer.full}
        found[variant]["tensors"] = len(list(trainer.model.parameters()))
        found[variant] |= {"wall": [], "cpu": [], "optimizer": []}
        if variant.startswith("fxdp"):
            found[variant]["traffic"] = trainer.traffic()
    same = _SameStep(trainers[SHARDED]) if SHARDED in trainers else None
    steps: list[list[float]] = []
    for _ in range(asked["rounds"]):
        for variant, trainer in trainers.items():
            trainer.step(0)  # the caches are the last variant's: this step is not counted
            for number in range(asked["steps"]):
                seconds = trainer.step(number)
                for name in ("wall", "cpu", "optimizer"):
                    found[variant][name].append(seconds[name])
        if same is not None:
            same.seconds(0)
            steps += [same.seconds(number) for number in range(asked["steps"])]
    for figures in found.values():
        slowest = torch.tensor(figures["wall"])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        figures["wall"] = slowest.tolist()
    return {"variants": found, "steps": steps, "ranks": dist.get_world_size()}


def _first(asked: dict[str, Any]) -> dict[str, Any]:
    """Seconds until the first step of one variant is done, from making the model on."""
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    trainer = _Trainer(asked["variants"][0], CASES[asked["model"]])
    trainer.step(0)
    return {"wall": time.perf_counter() - start, "cpu": time.process_time() - cpu}


def measure(asked: dict[str, Any]) -> None:
    """Measure what is asked for; rank 0 writes the answer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    found = _first(asked) if asked["what"] == "first" else _rounds(asked)
    if dist.get_rank() == 0:
        Path(asked["answer"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
