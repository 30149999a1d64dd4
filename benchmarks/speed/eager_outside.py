"""A compiled step with its loss outside, on global tensors, beside the same step with `loss_fn=`.

    python -m benchmarks.speed.eager_outside [RANKS] [BACKEND]

Both steps take turns, each several times; the least of each, in milliseconds, and their ratio. CPU time is
that of rank 0's process, which other programs on the machine disturb less.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import fxdp
from benchmarks.harness.models import CASES, next_token_loss

_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "resnet": nn.functional.cross_entropy, "gpt": next_token_loss,
}  # fmt: skip
_TURNS, _STEPS = 20, 2


def _steps(name: str, rank: int, ranks: int, backend: str) -> dict[str, Callable[[], None]]:
    case, loss_of = CASES[name], _LOSSES[name]
    x, y = (t.chunk(ranks)[rank].clone() for t in case.batch(0, ranks))
    made = [case.model(torch.device("cpu")) for _ in range(2)]
    models = [getattr(model, "body", model) for model in made]
    inside = fxdp.compile(models[0], loss_fn=loss_of, backend=backend)
    outside = fxdp.compile(models[1], backend=backend)

    def outside_loss() -> Tensor:
        global_x, global_y = fxdp.global_batch((x, y))
        return loss_of(outside(global_x), global_y)

    def step_of(loss: Callable[[], Tensor], model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def step() -> None:
            loss().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        return step

    return {
        "loss_fn=": step_of(lambda: inside(x, target=y), models[0]),
        "outside": step_of(outside_loss, models[1]),
    }


def _run(rank: int, ranks: int, backend: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    if rank == 0:
        print(
            f"{ranks} ranks, {backend}\n\n"
            "| model | loss_fn=, ms | outside, ms | ratio | loss_fn=, CPU ms | outside, CPU ms | ratio |\n"
            "|---|---|---|---|---|---|---|"
        )
    for name in _LOSSES:
        steps = _steps(name, rank, ranks, backend)
        times: dict[str, list[tuple[float, float]]] = {which: [] for which in steps}
        for turn in range(_TURNS):
            for which, step in steps.items():
                dist.barrier()
                begin, cpu = time.perf_counter(), time.process_time()
                for _ in range(_STEPS):
                    step()
                spent = time.perf_counter() - begin, time.process_time() - cpu
                if turn > 1:
                    times[which].append((spent[0] / _STEPS * 1e3, spent[1] / _STEPS * 1e3))
        row = []
        for clock in (0, 1):
            inside, outside = (min(each[clock] for each in found) for found in times.values())
            row += [f"{inside:.1f}", f"{outside:.1f}", f"{outside / inside:.3f}"]
        if rank == 0:
            print(f"| {name} | {' | '.join(row)} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Print a table for the given number of ranks (2) and backend (inductor)."""
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    backend = sys.argv[2] if len(sys.argv) > 2 else "inductor"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (ranks, backend, str(Path(folder) / "store")), ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
