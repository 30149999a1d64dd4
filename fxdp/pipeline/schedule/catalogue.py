"""Schedules by name, or from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from fxdp.errors import ScheduleError
from fxdp.options import check_name
from fxdp.pipeline.schedule import csv
from fxdp.pipeline.schedule.gpipe import gpipe
from fxdp.pipeline.schedule.interleaved import interleaved
from fxdp.pipeline.schedule.one_f_one_b import one_f_one_b
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.schedule.zero_bubble import zero_bubble

SCHEDULES: Mapping[str, Callable[[int, int, int], Schedule]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zero-bubble": zero_bubble}
)
"""Functions of stages, ranks and micro-batches; stage `s` is on rank `s % ranks`."""


def make(name: str, stages: int, ranks: int, microbatches: int) -> Schedule:
    """The schedule of that name, or of a file `*.csv` in torch's words.

    Raises `ScheduleError` for a name that is none (with near matches), a file that is not complete or made
    for other numbers, or fewer stages than ranks; `DeadlockError` for a file whose order blocks.
    """
    check_name(name)
    if name.endswith(".csv"):
        return _from_file(name, stages, ranks, microbatches)
    return SCHEDULES[name](stages, ranks, microbatches)


def _from_file(name: str, stages: int, ranks: int, microbatches: int) -> Schedule:
    schedule = csv.read(Path(name))
    got = {
        "stages": (schedule.stages, stages),
        "ranks": (len(schedule.ranks), ranks),
        "micro-batches": (schedule.microbatches, microbatches),
    }
    if wrong := [f"{has} {what}, not {asked}" for what, (has, asked) in got.items() if has != asked]:
        raise ScheduleError(f"schedule {name} is made for {', '.join(wrong)}: expected equal numbers")
    if not schedule.trains:
        raise ScheduleError(f"schedule {name} has forwards only: expected a B, or I and W, for each F")
    schedule.order()
    return schedule
