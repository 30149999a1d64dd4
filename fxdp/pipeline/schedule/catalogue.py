"""Schedules by name, or from a file.

Each schedule is a file of this folder with a `NAME` and a function that has the name of the file.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from fxdp.errors import ScheduleError
from fxdp.pipeline.schedule import csv, one_f_one_b
from fxdp.pipeline.schedule.schedule import Schedule


def _in_this_folder() -> Mapping[str, Callable[[int, int, int], Schedule]]:
    files = [found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)])]
    modules = [(file, importlib.import_module(f"{__package__}.{file}")) for file in files]
    return MappingProxyType({m.NAME: getattr(m, file) for file, m in modules if hasattr(m, "NAME")})


_SCHEDULES = _in_this_folder()
"""Schedule functions by name; arguments: stages, ranks, micro-batches. Stage `s` is on rank `s % ranks`."""


def make(name: str | None, stages: int, ranks: int, microbatches: int) -> Schedule:
    """Return the schedule with this name (None: 1F1B), or from a file `*.csv` in torch's format.

    Raises
    ------
    ScheduleError : an unknown name (with near matches), a file that is incomplete or made for different
        numbers, or fewer stages than ranks.
    DeadlockError : a file whose order deadlocks.
    """
    check_name(name)
    name = name or one_f_one_b.NAME
    if name.endswith(".csv"):
        return _from_file(name, stages, ranks, microbatches)
    return _SCHEDULES[name](stages, ranks, microbatches)


def check_name(name: str | None) -> None:
    """Refuse anything except a schedule's name, the name of a file `*.csv`, or None.

    Raises
    ------
    ScheduleError : names the nearest schedule, or all.
    """
    if name is None or name.endswith(".csv") or name in _SCHEDULES:
        return
    near = difflib.get_close_matches(name.lower(), _SCHEDULES, n=1)
    meant = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(_SCHEDULES)}, or a file *.csv"
    raise ScheduleError(f"no schedule `{name}`: {meant}")


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
    if schedule.in_rounds:
        raise ScheduleError(f"schedule {name} has rounds, which follow from a model: expected words as `0F2`")
    schedule.order()
    return schedule
