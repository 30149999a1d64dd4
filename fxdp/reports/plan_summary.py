"""Summarize a plan on one screen: model, communication by line of the user's code, stages.

The same rows give the text for a terminal of any width and the tables for a notebook.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxdp.ir.axis_rows import balance_lines
from fxdp.reports.by_line import CommunicatingLine, lines_of
from fxdp.reports.places import place, shortened
from fxdp.reports.rows import format_bytes
from fxdp.reports.schedule_text import schedule_lines
from fxdp.reports.sheet import Sheet
from fxdp.reports.tables import timings_line

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

    from fxdp.reports.plan import Plan

_NOTHING = "one rank sends nothing"
_SPOKEN = {"memory": "shared memory"}


def headline(plan: Plan) -> str:
    """Return a headline such as `Net on mesh(dp=4), a batch of 64: 5 messages, 1.5 KiB in a step`."""
    about = plan.details()
    axes = ", ".join(f"{axis}={size}" for axis, size in about.mesh.items())
    size = format_bytes(sum(row.bytes for row in plan.communication))
    count = sum(row.count for row in plan.communication)
    what = f"{count} messages, {size} in a step" if count else _NOTHING
    if plan.error:
        what = "the model cannot be captured"
    return f"{about.model or 'a model'} on mesh({axes}), a batch of {about.batch}: {what}"


def totals(plan: Plan) -> str:
    """Return the number of messages of each kind, and the bytes by transport."""
    kinds, by = Counter[str](), Counter[str]()
    for row in plan.communication:
        kinds[row.op] += row.count
        by[f" by {_SPOKEN.get(row.by, row.by)}" if row.by else ""] += row.bytes
    each = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{each}; {', '.join(f'{format_bytes(size)}{name}' for name, size in by.items())}"


def summary_lines(plan: Plan, width: int = 80, *, fold: bool = True) -> list[str]:
    """Format a plan for a text of `width` columns; file names and line numbers are never broken."""
    shown = [*textwrap.wrap(headline(plan), width)]
    if plan.error:
        return [*shown, "", *_error_lines(plan, width)]
    for line in (*plan.capture, *plan.choice):
        shown += textwrap.wrap(line, width, subsequent_indent="  ", drop_whitespace=True)
    for line in balance_lines(plan.axes):
        shown += textwrap.wrap(line, width, subsequent_indent="    ")
    if plan.schedule is not None:
        shown += ["", *_stage_lines(plan), "", f"schedule {plan.schedule.name}"]
        shown += schedule_lines(plan.schedule, width)
    if plan.communication:
        shown += ["", "communication of one step, by line", ""]
        shown += _line_texts(lines_of(plan.collectives(), fold=fold), width)
        shown += ["", *textwrap.wrap(f"total: {totals(plan)}", width)]
        shown.append(f"gradients: {format_bytes(plan.gradient_bytes)} per step")
    shown += ["", *_coverage_lines(plan, width), ""]
    for rank in plan.memory():
        shown += textwrap.wrap(f"memory of {rank}", width, subsequent_indent="  ")
    return [*shown, *textwrap.wrap(timings_line(plan.timings), width)]


def _error_lines(plan: Plan, width: int) -> Iterator[str]:
    """Yield the error of an incomplete plan, and the facts that are known in spite of the error."""
    for line in plan.error.splitlines():
        yield from textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False) or [""]
    rows = plan.parameters()
    size, held = (format_bytes(sum(sizes)) for sizes in ([r.bytes for r in rows], [r.held for r in rows]))
    yield ""
    yield f"{len(rows)} parameters, {size}, of which a rank holds {held}"


def _stage_lines(plan: Plan) -> Iterator[str]:
    for row in plan.stages:
        held, sent = format_bytes(row.parameter_bytes), format_bytes(row.sent)
        head = f"stage {row.stage} on rank {row.rank}: {100 * row.share:4.1f} % of the work"
        yield f"{head}, {held} of parameters, sends {sent}"
        yield f"  begins in {row.begins or 'the model itself'}"


def _coverage_lines(plan: Plan, width: int) -> Iterator[str]:
    rows = plan.coverage().rows
    if not rows:
        yield from textwrap.wrap(str(plan.coverage()), width)
        return
    yield "what does not split over the ranks"
    for row in rows:
        yield place(row.location)
        yield f"  {row.op}: {row.how}, {row.phase}, {format_bytes(row.bytes)}"
        for text in (row.cause, f"to do: {row.remedy}"):
            yield from textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")


@dataclass(frozen=True)
class Summary:
    """The summary of a plan for rich, as wide as the console."""

    plan: Plan
    fold: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        for line in summary_lines(self.plan, options.max_width, fold=self.fold):
            yield Text(line, "" if line.startswith("  ") or not line else "bold")


def plan_sheets(plan: Plan) -> list[Sheet]:
    """Return the plan as tables."""
    if plan.error:
        return [Sheet(headline(plan), ("why",), ((plan.error,),))]
    exchanges = tuple(
        (line.title if i == 0 else "", line.location.code if i == 0 and line.location.file else "", one.phase,
         one.kind, str(one.count), format_bytes(one.bytes), one.text, one.modules)
        for line in lines_of(plan.collectives())
        for i, one in enumerate(line.exchanges)
    )  # fmt: skip
    columns = ("line", "code", "phase", "what", "#times", "#bytes", "for", "in")
    stages = tuple(
        (str(row.stage), str(row.rank), f"{100 * row.share:.1f} %", format_bytes(row.parameter_bytes),
         format_bytes(row.sent), row.begins or "the model itself")
        for row in plan.stages
    )  # fmt: skip
    held = ("#stage", "#rank", "#work", "#parameters", "#sent per step", "begins in")
    found = [Sheet(headline(plan), columns, exchanges, totals(plan) if exchanges else "")]
    found += [Sheet("stages", held, stages)] if stages else []
    return [*found, *plan.coverage().sheets()]


def _line_texts(lines: Iterable[CommunicatingLine], width: int = 80) -> list[str]:
    """Format lines for a text of `width` columns; file names and line numbers are never cut."""
    shown, lines = list[str](), list(lines)
    wide = max([14, *(len(one.kind) for line in lines for one in line.exchanges)])
    for line in lines:
        code = shortened(line.location.code, width - len(line.title) - 2) if line.location.file else ""
        shown.append(f"{line.title}  {code}".rstrip())
        for one in line.exchanges:
            times = f"x{one.count}" if one.count > 1 else ""
            head = f"  {one.phase:8}  {one.kind:{wide}} {times:>5} {format_bytes(one.bytes):>10}  "
            module = f" in {one.modules}" if one.modules and one.modules not in one.text else ""
            rest = textwrap.wrap(one.text + module, max(width - len(head), 24), break_on_hyphens=False)
            shown += [(head if i == 0 else " " * len(head)) + part for i, part in enumerate(rest or [""])]
    return shown
