"""Schedules by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from fxdp.errors import ScheduleError
from fxdp.schedule.gpipe import gpipe
from fxdp.schedule.one_f_one_b import one_f_one_b
from fxdp.schedule.schedule import Schedule

SCHEDULES: Mapping[str, Callable[[int, int, int], Schedule]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b}
)
"""Functions of stages, ranks and micro-batches."""


def make(name: str, stages: int, ranks: int, microbatches: int) -> Schedule:
    """The schedule of that name; `ScheduleError` with near matches if there is none."""
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
        meant = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(SCHEDULES)}"
        raise ScheduleError(f"no schedule `{name}`: {meant}")
    return SCHEDULES[name](stages, ranks, microbatches)
