"""Memory of a step: what a plan predicts, what torch's allocator counts, and that of DDP and torch.compile.

    python -m benchmarks.speed.memory  # MLP, GPT and ResNet, 2 ranks, about 8 minutes
    python -m benchmarks.speed.memory --models mlp --variants fxdp-eager fxdp-shard-eager

`rest` is what is there between steps: parameters, buffers, a batch, optimizer state, and what a contender
holds for itself (DDP's buckets). `in a step` is the most that a forward, a backward and an optimizer's step
hold beside it, from allocation to release: an activation that were kept after the backward has read it would
be seen. `shared` is memory in which ranks of a host see each other's values: of a page that two of them map
each has half. `peak` is the sum. Other work on the machine changes nothing of it.

`resident` is the system's word for `in a step`: by how many bytes the process grew, at most, where each value
has pages of its own, so that what is free is given back. It has what no allocator of torch's gives out, too:
workspaces of kernels and buffers of gloo. `no communication` is the model with a rank's samples.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxdp
from benchmarks.harness.models import CASES, Case
from benchmarks.harness.processes import launch
from fxdp.reports.rows import format_bytes
from tests.held_memory import bytes_at_rest, peak_of, resident_peak, shared_pages

CONSOLE = Console(width=max(Console().width, 110))
BASELINE = "ddp-compile"
VARIANTS: dict[str, Callable[[nn.Module], Any]] = {
    "no communication": torch.compile,
    "ddp": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    BASELINE: lambda model: torch.compile(DistributedDataParallel(model, gradient_as_bucket_view=True)),
    "fxdp-eager": lambda model: fxdp.compile(model, backend="eager"),
    "fxdp": fxdp.compile,
    "fxdp-shard-eager": lambda model: fxdp.compile(model, strategy="shard", backend="eager"),
    "fxdp-shard": lambda model: fxdp.compile(model, strategy="shard"),
}


class _Training:
    """One variant of one model on this rank."""

    def __init__(self, variant: str, case: Case) -> None:
        rank, ranks, size = dist.get_rank(), dist.get_world_size(), case.local_batch
        own = slice(rank * size, (rank + 1) * size)
        self._batch = [part[own].clone() for part in case.batch(0, ranks)]
        model = case.model(torch.device("cpu"))
        self.loss = VARIANTS[variant](model)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(self) -> None:
        self.loss(*self._batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def _measured(asked: dict[str, Any]) -> dict[str, Any]:
    """One variant of one model on this rank."""
    training = _Training(asked["variant"], CASES[asked["model"]])
    for _ in range(3):  # DDP makes its buckets anew in the second
        training.step()
    rest, moving = bytes_at_rest(), peak_of(training.step)
    resident = resident_peak(training.step)
    dist.barrier()  # all have what they share open
    found: dict[str, Any] = {"rest": rest, "moving": moving, "resident": resident}
    found["shared"] = shared_pages()
    dist.barrier()
    if isinstance(training.loss, fxdp.CompiledModule):
        (memory,) = training.loss.plan.memory()
        found |= {"predicted": memory.peak.bytes, "kinds": str(memory)}
    return found


def _rank(asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    found = _measured(asked)
    if dist.get_rank() == 0:
        Path(asked["answer"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _peak(one: dict[str, Any]) -> int:
    return int(one["rest"] + one["moving"] + one["shared"])


def _table(name: str, found: dict[str, dict[str, Any]]) -> Table:
    shown = Table(title=name, title_justify="left")
    shown.add_column("variant", no_wrap=True)
    for column in ("rest", "in a step", "resident", "shared", "peak", "x", "predicted", "predicted x"):
        shown.add_column(column, justify="right", no_wrap=True)

    base = found.get(BASELINE)
    for variant, one in found.items():
        sizes = [format_bytes(one[key]) for key in ("rest", "moving", "resident", "shared")]
        told = one.get("predicted")
        row = [*sizes, format_bytes(_peak(one)), "" if base is None else f"{_peak(one) / _peak(base):.2f}"]
        row += [] if told is None else [format_bytes(told), f"{told / _peak(one):.3f}"]
        shown.add_row(variant, *row)
    shown.caption = f"x: times {BASELINE}; predicted x: what the plan says over what was counted"
    return shown


def main() -> int:
    """Measure each variant on fresh ranks; on a rank, be one."""
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        _rank(json.loads(sys.argv[1]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=tuple(CASES), default=["mlp", "gpt", "resnet"])
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    failed = False
    for name in asked.models:
        found = {}
        for variant in asked.variants:
            with tempfile.TemporaryDirectory(prefix="fxdp-bench-") as folder:
                answer = Path(folder) / "answer.json"
                question = {"model": name, "variant": variant, "answer": str(answer)}
                command = [sys.executable, "-m", "benchmarks.speed.memory", json.dumps(question)]
                own = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
                failed |= bool(launch(command, asked.ranks, environment=own, timeout=1800))
                if answer.exists():
                    found[variant] = json.loads(answer.read_text())
        CONSOLE.print(_table(name, found))
        for variant, one in found.items():
            if "kinds" in one:
                CONSOLE.print(f"{variant}: {one['kinds']}", style="dim", highlight=False)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
