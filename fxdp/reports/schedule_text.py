"""Format a schedule as text: the order of actions on each rank, or a time axis."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.schedule.timeline import Costs


def schedule_text(schedule: Schedule) -> str:
    """Return one line per rank in torch's action words: `rank 0: 0F0 0F1 0B0 ...`."""
    return "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(schedule.ranks))


def timetable(schedule: Schedule, costs: Costs | None = None, columns: int | None = None) -> str:
    """Return the schedule on a time axis: one line per rank, one word per unit of time, `.` for waiting.

        rank 0: F0 F1 .  .  B0 B0 .  B1 B1
        rank 1: .  F0 B0 B0 F1 B1 B1

    Stage numbers are omitted if stage and rank are equal. Starts and durations are rounded to full units;
    without costs F, I and W take one unit and B two. A schedule wider than `columns` continues below.
    """
    line = schedule.timeline(costs)
    own_stage = schedule.placement == tuple(range(schedule.stages))
    rows = []
    for rank in range(line.ranks):
        words: list[str] = []
        for spec in line.of_rank(rank):
            words += ["."] * (round(spec.start) - len(words))
            word = str(spec.action).removeprefix(str(spec.action.stage) if own_stage else "")
            words += [word] * (round(spec.finish) - len(words))
        rows.append(words)
    return "\n\n".join("\n".join(block) for block in _blocks(rows, columns))


def schedule_lines(schedule: Schedule, columns: int) -> list[str]:
    """Return the schedule for a summary: on a time axis, or what each round computes."""
    if not schedule.in_rounds:
        return timetable(schedule, columns=columns).splitlines()
    rows = (textwrap.wrap(line, columns, subsequent_indent="  ") for line in _round_lines(schedule))
    return [line for row in rows for line in row]


def _round_lines(schedule: Schedule) -> Iterator[str]:
    """Yield a line for each run of rounds in which the same stages compute.

    rounds 1 to 4: stage 0 forward
    round 5: stage 0 forward, stage 1 forward and backward
    """
    rounds: dict[int, dict[int, set[str]]] = {}
    for action in sorted(action for row in schedule.ranks for action in row):
        kinds = rounds.setdefault(action.round or 0, {}).setdefault(action.stage, set())
        kinds.add("backward" if action.gives_gradient else "forward")
    for stages, run in groupby(sorted(rounds), rounds.__getitem__):
        first, *_, last = [*run] * 2
        which = f"round {first}" if first == last else f"rounds {first} to {last}"
        computed = (f"stage {stage} {' and '.join(sorted(kinds)[::-1])}" for stage, kinds in stages.items())
        yield f"{which}: {', '.join(computed)}"


def _blocks(rows: Sequence[Sequence[str]], columns: int | None) -> Iterator[list[str]]:
    """Yield the lines of all ranks, cut into spans of time that fit into the columns."""
    width = max((len(word) for words in rows for word in words), default=0)
    digits = len(str(len(rows) - 1))
    heads = [f"rank {rank:>{digits}}: " for rank in range(len(rows))]
    units = max(map(len, rows))
    fit = units if columns is None else max((columns - len(heads[0]) + 1) // (width + 1), 1)
    for begin in range(0, units, fit):
        pieces = (words[begin : begin + fit] for words in rows)
        lines = zip(heads, pieces, strict=True)
        yield [(head + " ".join(word.ljust(width) for word in words)).rstrip() for head, words in lines]
