"""What one rank measures; `pipeline.py` starts it on all ranks with a JSON object as its argument."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.count import count
from benchmarks.harness.models import CASES, Case
from benchmarks.speed.pipeline_contenders import CPU, Contender, Name, make, stages_each
from fxdp.reports.schedule_svg import schedule_svg

TOLERANCE = 1e-5
"""Of float32 losses and gradients, relative to the largest value."""


def check(contenders: list[Contender], case: Case, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
    """The worst relative error of each contender's loss and gradients to one device's; all ranks' worst."""
    model = case.model(CPU)
    loss = model(*batch)
    loss.backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    errors = []
    for contender in contenders:
        found = contender.step(*batch)
        worst = max(_error(g, wanted[n]) for n, g in contender.gradients().items())
        if found is not None and not (contender.name.by == "torch" and contender.name.schedule == "dp"):
            worst = max(worst, _error(found, loss.detach()))
        missing = torch.tensor([n in contender.gradients() for n in wanted], dtype=torch.int32)
        dist.all_reduce(missing)
        errors.append(worst if bool(missing.all()) else float("inf"))
    shared = torch.tensor(errors, dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return {str(c.name): e for c, e in zip(contenders, shared.tolist(), strict=True)}


def _error(value: Tensor, wanted: Tensor) -> float:
    return ((value - wanted).abs().max() / wanted.abs().max()).item()


Times = dict[str, list[float]]


def rounds(
    contenders: list[Contender], batch: tuple[Tensor, Tensor], number: int, steps: int
) -> tuple[Times, Times]:
    """Seconds of each contender's steps, interleaved, and processor seconds of both ranks together.

    A step is as long as it is on the slowest rank.
    """
    seconds: Times = {str(c.name): [] for c in contenders}
    busy: Times = {str(c.name): [] for c in contenders}
    for contender in contenders:
        for _ in range(2):
            contender.step(*batch)
    for iteration in range(number):
        start = iteration % len(contenders)
        for contender in contenders[start:] + contenders[:start]:
            contender.step(*batch)  # the caches are the last contender's: this step is not counted
            for _ in range(steps):
                elapsed, worked = _time(contender, batch)
                seconds[str(contender.name)].append(elapsed)
                busy[str(contender.name)].append(worked)
    for name in seconds:
        seconds[name] = _reduced(seconds[name], dist.ReduceOp.MAX)
        busy[name] = _reduced(busy[name], dist.ReduceOp.SUM)
    return seconds, busy


def _time(contender: Contender, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    contender.step(*batch)
    return time.perf_counter() - start, time.process_time() - worked


def _reduced(times: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    shared = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(shared, op)
    found: list[float] = shared.tolist()
    return found


def bytes_of(contender: Contender, batch: tuple[Tensor, Tensor]) -> dict[str, int]:
    """Bytes that all ranks hand over in a step, counted and planned, and the worst rank's peak memory."""
    dist.barrier()
    comms = None if contender.compiled is None else contender.compiled._process_mesh.comms
    before = 0 if comms is None else comms.transport.handed_bytes
    seen = count(lambda: contender.step(*batch))
    messages = 0 if comms is None else comms.transport.handed_bytes - before
    handed = torch.tensor(seen.handed + messages)
    dist.all_reduce(handed)
    peak = torch.tensor(seen.peak)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    found = {"handed_bytes": int(handed), "peak_bytes": int(peak)}
    if contender.compiled is not None and contender.name.schedule != "dp":
        rows = contender.compiled.plan.communication
        found["planned_bytes"] = sum(row.bytes for row in rows)
    return found


def schedule_of(contender: Contender) -> dict[str, Any]:
    """The schedule that ran, its bubble, and the closed form for equal stages."""
    schedule = contender.compiled.plan.schedule
    ranks, count = len(schedule.ranks), schedule.microbatches
    rounds = count * (3 if schedule.name == "zero-bubble" else stages_each(schedule.name))
    return {
        "bubble": schedule.timeline().bubble,
        "closed_form": (ranks - 1) / (rounds + ranks - 1),
        "svg": schedule_svg(schedule),
    }


def main() -> None:
    """Measure; rank 0 writes the answer."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    case = CASES[asked["model"]]
    batch = case.batch(0, dist.get_world_size())
    contenders = make([Name(*words) for words in asked["names"]], case)
    load = os.getloadavg()[0]
    answer: dict[str, Any] = {"errors": check(contenders, case, batch)}
    wrong = {name: error for name, error in answer["errors"].items() if not error <= TOLERANCE}
    if wrong:
        raise SystemExit(f"contenders that do not agree with one device within {TOLERANCE}: {wrong}")
    timed = rounds(contenders, batch, asked["rounds"], asked["steps"])
    answer["seconds"], answer["cpu_seconds"] = timed
    answer["load"] = [load, os.getloadavg()[0]]
    answer["bytes"] = {str(c.name): bytes_of(c, batch) for c in contenders}
    staged = [c for c in contenders if c.compiled is not None and c.name.schedule != "dp"]
    answer["schedules"] = {str(c.name): schedule_of(c) for c in staged}
    if dist.get_rank() == 0:
        Path(asked["answer"]).write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
