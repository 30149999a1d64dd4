"""Read and write a user's schedule in the format of torch's pipelining: a row of actions per rank.

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

A row lists a rank's actions in order. Empty cells (padding by torch) are skipped. Words that move or gather
data, like `0SEND_F0` or `1UNSHARD`, are skipped, too: fxdp derives all communication from the order of
actions. `(0F1;0B0)OVERLAP_F_B` stands for both parts, one after the other.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from fxdp.errors import ScheduleError
from fxdp.pipeline.schedule.action import Action
from fxdp.pipeline.schedule.schedule import Schedule, listed

_COMMUNICATION = re.compile(r"\d+(WAIT_)?(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_BYTES = 1 << 26


def read(path: Path) -> Schedule:
    """Return the schedule in a file; raise `ScheduleError` if the file cannot be read or is incomplete."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise OSError("it is no plain file")
        if path.stat().st_size > _BYTES:
            raise OSError(f"it has more than {_BYTES:,} bytes")
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise ScheduleError(f"schedule {path} cannot be read: {error}") from error
    return parse(text, str(path))


def parse(text: str, name: str = "csv") -> Schedule:
    """Return the schedule in a text, which determines stages, micro-batches and placement.

    Raises
    ------
    ScheduleError : lists every word that is no action, or every fault of the schedule.
    """
    rows: list[tuple[Action, ...]] = []
    faults: list[str] = []
    for rank, cells in enumerate(_cells(text, name)):
        row: list[Action] = []
        for word in (word for cell in cells for word in _words(cell)):
            try:
                row.append(Action.parse(word))
            except ScheduleError as error:
                faults.append(f"row {rank}: {error}")
        rows.append(tuple(row))
    if faults:
        shown = "\n  ".join(listed(faults))
        raise ScheduleError(f"schedule {name} has words that are none of torch's:\n  {shown}")
    return _schedule(name, tuple(rows))


def write(schedule: Schedule) -> str:
    """Return the schedule as text for `parse` and for torch."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.ranks)


def _cells(text: str, name: str) -> Iterator[list[str]]:
    """Yield the rows of cells; blank lines at the end do not count as ranks."""
    try:
        yield from csv.reader(text.rstrip().splitlines())
    except csv.Error as error:  # e.g. a cell of more than 128 KiB
        raise ScheduleError(f"schedule {name} is no table of actions: {error}") from error


def _words(cell: str) -> Iterator[str]:
    overlapped = _OVERLAPPED.fullmatch(cell.strip())
    for word in overlapped[1].split(";") if overlapped else [cell]:
        if word.strip() and not _COMMUNICATION.fullmatch(word.strip()):
            yield word.strip()


def _schedule(name: str, rows: tuple[tuple[Action, ...], ...]) -> Schedule:
    actions = [action for row in rows for action in row]
    if not actions:
        raise ScheduleError(f"schedule {name} is empty: expected a row of actions, such as `0F0`, per rank")
    stages = 1 + max(action.stage for action in actions)
    microbatches = 1 + max(action.microbatch for action in actions)
    home = {action.stage: rank for rank, row in reversed(list(enumerate(rows))) for action in reversed(row)}
    _check_none_absent(name, "stages", stages, home)
    _check_none_absent(name, "micro-batches", microbatches, {action.microbatch for action in actions})
    if idle := [str(rank) for rank, row in enumerate(rows) if not row]:
        raise ScheduleError(f"schedule {name} has nothing in row {', '.join(idle)}: each rank needs a stage")
    return Schedule(name, stages, microbatches, tuple(home[stage] for stage in range(stages)), rows)


def _check_none_absent(name: str, what: str, count: int, found: Collection[int]) -> None:
    """Raise unless the numbers run from 0 without gaps.

    Stops after three absent numbers, because a word like `0F99999999` may claim any count.
    """
    absent = list(itertools.islice((number for number in range(count) if number not in found), 3))
    if absent:
        more = count - len(found) - len(absent)
        listing = ", ".join(map(str, absent)) + (f" and {more} more" if more else "")
        raise ScheduleError(f"schedule {name} has {count} {what}, but nothing of {listing}")
