"""What one rank of `overlap.py` sees: when its steps compute and wait, and when the wire is busy."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import fxdp
from benchmarks.harness.models import CASES

WARM = 3
_HALVES = ("forward", "backward")


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """The spans of the fastest of several steps, in ms from its start, and what the plan says of its sums."""
    case, rank, ranks = CASES[asked["model"]], dist.get_rank(), dist.get_world_size()
    compiled = fxdp.compile(case.model(torch.device("cpu")), backend=asked["backend"])
    own = slice(rank * case.local_batch, (rank + 1) * case.local_batch)
    batch = [part[own].clone() for part in case.batch(0, ranks)]
    steps = []
    for number in range(WARM + asked["steps"]):
        compiled.zero_grad()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
            compiled(*batch).backward()
        if number >= WARM:
            steps.append(_spans(seen))
    lengths = torch.tensor([step["end"] for step in steps], dtype=torch.float64)
    dist.all_reduce(lengths, dist.ReduceOp.MAX)
    comms = compiled._process_mesh.comms
    cost = None if comms is None else comms.transport.cost
    return {
        **steps[int(lengths.argmin())],
        "sums": {row.key: row.bytes for row in compiled.plan.collectives()},
        "link": None if cost is None else [cost.latency, cost.per_byte],
    }


def _spans(seen: profile) -> dict[str, Any]:
    """What a recorded step did when: its halves, starts of sums, waits, and gloo's work on other threads."""
    results = seen.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted(results.events(), key=lambda event: event.start_ns())
    origin = next(event.start_ns() for event in events if event.name() == "forward")

    def span(event: Any) -> tuple[float, float]:
        return (event.start_ns() - origin) / 1e6, (event.start_ns() + event.duration_ns() - origin) / 1e6

    halves = [span(event) for event in events if event.name() in _HALVES]
    starts = {
        event.name().partition(":")[0]: span(event)[1]
        for event in events if event.name().startswith("all_reduce")
    }  # fmt: skip
    waits = {
        event.name().removeprefix("wait for "): span(event)
        for event in events if event.name().startswith("wait for")
    }  # fmt: skip
    wire = [span(event) for event in events if event.name().startswith("gloo:") and event.is_async()]
    return {"end": halves[-1][1], "halves": halves, "starts": starts, "waits": waits, "wire": wire}


def main() -> None:
    """Measure what the first argument, a JSON object, asks for; each rank writes a file."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    found = measure(asked)
    Path(asked["answers"], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
