"""Sharded parameters beside FSDP2 and beside fxdp without sharding: seconds, CPU seconds, memory.

    python benchmarks/sharding.py                          # MLP of 40 small layers and GPT, 2 ranks
    python benchmarks/sharding.py --models mlp --rounds 4

All variants take turns in one pair of processes, each rank with one thread. `wall` is the fastest step on
the slowest rank, `CPU` the median of CPU seconds of a rank's step, all threads: that is steadier.
`gradients` is what is left after a backward; `first` the first step, compilation included, from a warm cache.
Losses of fxdp are those of the whole batch; FSDP2's are each rank's own, so only fxdp's are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from models import CASES, Case
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fxdp
from fxdp.demo.launch import launch
from fxdp.reports.rows import format_bytes

CONSOLE = Console(width=max(Console().width, 110))
BASELINE = "fsdp2-compile"


def _fsdp2(model: nn.Module, mesh: Any) -> Any:
    """A group per block, as FSDP2's own examples have it, and one for the rest."""
    for parent in model.modules():
        for block in parent if isinstance(parent, (nn.ModuleList, nn.Sequential)) else ():
            if next(block.parameters(), None) is not None:
                fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


VARIANTS: dict[str, Any] = {
    "fsdp2": _fsdp2,
    BASELINE: lambda model, mesh: torch.compile(_fsdp2(model, mesh)),
    "fxdp-replicate": lambda model, mesh: fxdp.compile(model, mesh),
    "fxdp-shard": lambda model, mesh: fxdp.compile(model, mesh, strategy="shard", bucket_mb=4),
}


class _Trainer:
    """One variant at work on this rank."""

    def __init__(self, variant: str, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        self.model: nn.Module = case.model(torch.device("cpu"))
        self.loss = VARIANTS[variant](self.model, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, number: int) -> tuple[float, float, float]:
        """Seconds, CPU seconds and loss of one step that all ranks begin together."""
        rank, size = dist.get_rank(), self.case.local_batch
        whole = self.case.batch(number, dist.get_world_size())
        batch = [part[rank * size : (rank + 1) * size] for part in whole]
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        loss = self.loss(*batch)
        loss.backward()
        self.gradients = sum(_held(p.grad) for p in self.model.parameters() if p.grad is not None)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start, time.process_time() - cpu, loss.item()


def _held(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def _measured(case: Case, rounds: int, steps: int) -> dict[str, Any]:
    trainers, found = {}, {}
    for variant in VARIANTS:
        start = time.perf_counter()
        trainers[variant] = trainer = _Trainer(variant, case)
        losses = [trainer.step(number)[2] for number in range(4)]
        held = sum(_held(p) for p in trainer.model.parameters())
        found[variant] = {
            "wall": [], "cpu": [], "losses": losses, "held": held, "gradients": trainer.gradients,
            "first": time.perf_counter() - start,
        }  # fmt: skip
    for _ in range(rounds):
        for variant, trainer in trainers.items():
            trainer.step(0)  # the caches are the last variant's: this step is not counted
            for number in range(steps):
                wall, cpu, _ = trainer.step(number)
                found[variant]["wall"].append(wall)
                found[variant]["cpu"].append(cpu)
    for figures in found.values():
        slowest = torch.tensor(figures["wall"])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        figures["wall"] = slowest.tolist()
    return found


def _rank(asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    found = _measured(CASES[asked["model"]], asked["rounds"], asked["steps"])
    if dist.get_rank() == 0:
        Path(asked["answer"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _table(name: str, found: dict[str, Any]) -> Table:
    shown = Table(title=name, title_justify="left")
    shown.add_column("variant", no_wrap=True)
    for column in ("wall", "x", "CPU", "x", "parameters", "gradients", "first", "loss"):
        shown.add_column(column, justify="right", no_wrap=True)
    base, whole = found[BASELINE], found["fxdp-replicate"]["losses"]
    for variant, figures in found.items():
        wall, cpu = min(figures["wall"]), median(figures["cpu"])
        apart = max(abs(a / b - 1) for a, b in zip(figures["losses"], whole, strict=True))
        shown.add_row(
            variant, f"{wall * 1e3:.1f} ms", f"{wall / min(base['wall']):.2f}",
            f"{cpu * 1e3:.1f} ms", f"{cpu / median(base['cpu']):.2f}",
            format_bytes(figures["held"]), format_bytes(figures["gradients"]), f"{figures['first']:.1f} s",
            f"{apart:.0e}" if variant.startswith("fxdp") else "",
        )  # fmt: skip
    shown.caption = f"x: times {BASELINE}; loss: largest relative difference to fxdp-replicate in 4 steps"
    return shown


def main() -> int:
    """Measure on fresh ranks; on a rank, be one."""
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        _rank(json.loads(sys.argv[1]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=tuple(CASES), default=["mlp", "gpt"])
    parser.add_argument("--rounds", type=int, default=8, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=4, help="counted steps in a turn")
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    failed = False
    for name in asked.models:
        with tempfile.TemporaryDirectory(prefix="fxdp-bench-") as folder:
            answer = Path(folder) / "answer.json"
            question = {"model": name, "rounds": asked.rounds, "steps": asked.steps, "answer": str(answer)}
            command = [sys.executable, __file__, json.dumps(question)]
            failed |= bool(launch(command, asked.ranks, environment={"OMP_NUM_THREADS": "1"}, timeout=1800))
            if answer.exists():
                CONSOLE.print(_table(name, json.loads(answer.read_text())))
    CONSOLE.print(f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores", style="dim")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
