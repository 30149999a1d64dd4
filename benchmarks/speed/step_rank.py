"""What one rank measures; `step_time.py` starts it, once per rank.

first   one variant in a fresh process and a cold cache: first step, losses, memory, bytes
rounds  all variants in one process, interleaved: a few steps of each, round after round
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fxdp
from benchmarks.harness.count import count
from benchmarks.harness.models import CASES, Case
from benchmarks.speed.variants import ALONE, FULL, Loss, make_loss

CHECKED_STEPS = 5


@dataclass(frozen=True)
class Trainer:
    """One variant of one model, at work on this rank."""

    variant: str
    case: Case
    device: torch.device
    loss: Loss
    optimizer: torch.optim.Optimizer

    @classmethod
    def make(cls, variant: str, case: Case, device: torch.device) -> Trainer:
        model: nn.Module = case.model(device)
        loss = make_loss(variant, model)
        return cls(variant, case, device, loss, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))

    def batch(self, step: int) -> tuple[torch.Tensor, ...]:
        rank, ranks, size = dist.get_rank(), dist.get_world_size(), self.case.local_batch
        rows = slice(None) if self.variant == FULL else slice(rank * size, (rank + 1) * size)
        return tuple(part[rows].to(self.device) for part in self.case.batch(step, ranks))

    def step(self, batch: tuple[torch.Tensor, ...]) -> tuple[float, torch.Tensor]:
        """Seconds and loss of one training step that all ranks begin together."""
        dist.barrier()
        self._synchronize()
        start = time.perf_counter()
        loss = self.loss(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._synchronize()
        return time.perf_counter() - start, loss.detach()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure_first(variant: str, case: Case, device: torch.device) -> dict[str, Any]:
    """One variant alone, from nothing."""
    dist.barrier()
    start = time.perf_counter()
    trainer = Trainer.make(variant, case, device)
    prepared = time.perf_counter() - start
    seconds, losses = [], []
    for step in range(CHECKED_STEPS):
        elapsed, loss = trainer.step(trainer.batch(step))
        seconds.append(elapsed)
        losses.append(_global_loss(variant, loss))
    seconds[0] += prepared  # wrapping the model is part of the first step
    return {
        "first_seconds": seconds[0],
        "next_seconds": seconds[1:],
        "losses": losses,
        "peak_bytes": _peak_bytes(device),
        "handed_bytes": _handed_bytes(trainer),
        "timings": dict(getattr(getattr(trainer.loss, "plan", None), "timings", {})),
    }


def measure_rounds(
    variants: list[str], case: Case, device: torch.device, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Seconds of each variant's steps; a step is as long as it is on the slowest rank."""
    trainers = [Trainer.make(variant, case, device) for variant in variants]
    for trainer in trainers:
        for step in range(3):
            trainer.step(trainer.batch(step))
    found: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(rounds):
        for trainer in _rotated(trainers, number):
            trainer.step(trainer.batch(0))  # the caches are the last variant's: this step is not counted
            batches = [trainer.batch(step) for step in range(steps)]
            found[trainer.variant] += [trainer.step(batch)[0] for batch in batches]
    for times in found.values():
        slowest = torch.tensor(times, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times[:] = slowest.tolist()
    return found


def _rotated(trainers: list[Trainer], number: int) -> Iterator[Trainer]:
    start = number % len(trainers)
    yield from trainers[start:] + trainers[:start]


def _global_loss(variant: str, loss: torch.Tensor) -> float:
    """The loss of the global batch; DDP returns each rank its own."""
    if variant.startswith("fxdp") or variant in ALONE:
        return loss.item()
    mean = loss / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _handed_bytes(trainer: Trainer) -> int:
    """Bytes that this rank hands to collectives in one step: to the backend, as the profiler sees its calls,
    and to fxdp's own messages.
    """
    batch = trainer.batch(0)
    dist.barrier()
    before = _message_bytes(trainer)
    seen = count(lambda: trainer.loss(*batch).backward())
    return seen.handed + _message_bytes(trainer) - before


def _message_bytes(trainer: Trainer) -> int:
    if not isinstance(trainer.loss, fxdp.CompiledModule):
        return 0
    comms = trainer.loss._process_mesh.comms
    return 0 if comms is None else comms.transport.handed_bytes


def main() -> None:
    """Measure what the first argument, a JSON object, asks for; rank 0 writes the answer."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    cuda = asked["device"] == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=10))
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    case = CASES[asked["model"]]
    answer: Any
    if asked["what"] == "first":
        answer = measure_first(asked["variant"], case, device)
    else:
        answer = measure_rounds(asked["variants"], case, device, asked["rounds"], asked["steps"])
    if dist.get_rank() == 0:
        Path(asked["answer"]).write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
