"""Memory of a step: what a plan predicts, what torch's allocator counts, and that of DDP and torch.compile.

    python benchmarks/memory.py                              # MLP, GPT and ResNet, 2 ranks, about 8 minutes
    python benchmarks/memory.py --models mlp --variants fxdp-eager fxdp-shard-eager

`still` is what is there all the time: parameters, buffers, optimizer state, inputs. `comes and goes` is the
most that a forward and backward hold beside it, from allocation to release, gradients included: an activation
that were kept after the backward has read it would be seen. `shared` are buffers in which ranks of a host
exchange large values (DDP has its own, in gloo, which nobody counts). `peak` is the sum. Other work on the
machine changes nothing of it. `no communication` is the model with a rank's samples.
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
from models import CASES
from processes import launch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxdp
from fxdp.reports.rows import format_bytes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.held_memory import bytes_of, peak_of, shared_bytes

CONSOLE = Console(width=max(Console().width, 110))
BASELINE = "ddp-compile"
VARIANTS: dict[str, Callable[[nn.Module], Any]] = {
    "no communication": torch.compile,
    "ddp": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    BASELINE: lambda model: torch.compile(DistributedDataParallel(model, gradient_as_bucket_view=True)),
    "fxdp-eager": lambda model: fxdp.compile(model, compute="eager"),
    "fxdp": fxdp.compile,
    "fxdp-shard-eager": lambda model: fxdp.compile(model, strategy="shard", compute="eager"),
    "fxdp-shard": lambda model: fxdp.compile(model, strategy="shard"),
}


def _measured(asked: dict[str, Any]) -> dict[str, Any]:
    """One variant of one model on this rank."""
    case, rank, ranks = CASES[asked["model"]], dist.get_rank(), dist.get_world_size()
    model = case.model(torch.device("cpu"))
    loss = VARIANTS[asked["variant"]](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    own = slice(rank * case.local_batch, (rank + 1) * case.local_batch)
    batch = [part[own].clone() for part in case.batch(0, ranks)]
    for _ in range(3):
        loss(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = [v for each in optimizer.state.values() for v in each.values() if isinstance(v, Tensor)]
    still = bytes_of([*model.parameters(), *model.buffers(), *batch, *state])
    moving = peak_of(lambda: loss(*batch).backward())
    found = {"still": still, "moving": moving, "shared": shared_bytes(ranks)}
    if isinstance(loss, fxdp.CompiledModule):
        (memory,) = loss.plan.memory()
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


def _table(name: str, found: dict[str, dict[str, Any]]) -> Table:
    shown = Table(title=name, title_justify="left")
    shown.add_column("variant", no_wrap=True)
    for column in ("still", "comes and goes", "x", "shared", "peak", "x", "predicted", "predicted x"):
        shown.add_column(column, justify="right", no_wrap=True)

    def peak(one: dict[str, Any]) -> int:
        return int(one["still"] + one["moving"] + one["shared"])

    base = found.get(BASELINE)
    for variant, one in found.items():
        sizes = [format_bytes(one[key]) for key in ("still", "moving", "shared")]
        times = ["", ""] if base is None else [
            f"{one['moving'] / base['moving']:.2f}", f"{peak(one) / peak(base):.2f}"
        ]  # fmt: skip
        told = one.get("predicted")
        row = [sizes[0], sizes[1], times[0], sizes[2], format_bytes(peak(one)), times[1]]
        row += [] if told is None else [format_bytes(told), f"{told / peak(one):.3f}"]
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
                command = [sys.executable, __file__, json.dumps(question)]
                own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
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
