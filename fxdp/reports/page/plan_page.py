"""Render a plan as a page: its rows, inserted into `report.html`."""

from __future__ import annotations

import errno
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from fxdp.errors import InputError
from fxdp.reports.by_line import lines_of
from fxdp.reports.graph_display import symbol_of
from fxdp.reports.page.charts import memory_svg, stages_svg
from fxdp.reports.page.module_tree import module_tree
from fxdp.reports.places import place, short_path
from fxdp.reports.plan_summary import headline, totals
from fxdp.reports.rows import format_bytes
from fxdp.reports.tables import timings_line

if TYPE_CHECKING:
    from fxdp.reports.plan import Plan
    from fxdp.reports.plan_data.collective import Collective

_TEXT = 200_000  # the most characters of program text on a page


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters.update(bytes=format_bytes, place=place, short_path=short_path, symbol_of=symbol_of)
    return environment.get_template("report.html")


def plan_page(plan: Plan) -> str:
    """Return the full page, from the headline down to the cause of each message."""
    details, rows = plan.details(), plan.collectives()
    size = sum(row.bytes for row in rows)
    return _template().render(
        plan=plan,
        details=details,
        headline=headline(plan),
        totals=totals(plan) if rows else "",
        tiles=_tiles(plan, size),
        lines=lines_of(rows),
        largest=max((one.bytes for line in lines_of(rows) for one in line.exchanges), default=1) or 1,
        kinds=_kinds(rows),
        root=module_tree(details),
        memory=[(one, memory_svg(one)) for one in plan.memory()],
        stage_map=stages_svg(plan.stages, plan.edges) if plan.schedule is not None else "",
        schedule=plan.schedule_svg() if plan.schedule is not None else "",
        options=_options(details.options),
        timings=timings_line(plan.timings),
        text=plan.text if len(plan.text) <= _TEXT else "",
    )


def check_file(path: Path) -> None:
    """Raise if a file cannot be written, before the work on its contents begins.

    Raises
    ------
    InputError : the file cannot be written, with the reason.
    """
    there = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(there, os.W_OK):
        known = errno.EISDIR if path.is_dir() else errno.EACCES if path.parent.is_dir() else errno.ENOENT
        raise InputError(f"cannot write {path}: {os.strerror(known)}. Name another file")


def write_file(path: Path | str, text: str) -> None:
    """Write text to a file that the user named.

    Raises
    ------
    InputError : the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}. Name another file") from error
    except (TypeError, ValueError) as error:  # not a path, or a path that no file can have
        raise InputError(f"cannot write {path!r}: {error}. Expected the path of a file") from error


def _tiles(plan: Plan, size: int) -> list[tuple[str, str]]:
    """Return the numbers at the top of the page with their captions."""
    if plan.error:
        return [(format_bytes(sum(row.held for row in plan.parameters())), "of parameters on a rank")]
    peak = max((one.peak.bytes for one in plan.memory()), default=0)
    full = len(plan.coverage())
    return [
        (format_bytes(size), "travel in a step"),
        (str(sum(row.count for row in plan.communication)), "messages"),
        (format_bytes(plan.gradient_bytes), "of them gradients"),
        (format_bytes(peak), "at most on a rank"),
        (str(full) if full else "all", "places do not split" if full else "splits over the ranks"),
    ]


def _kinds(rows: tuple[Collective, ...]) -> list[dict[str, Any]]:
    """Count the collectives by kind, phase, axis and transport."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        key = {"kind": row.kind, "phase": row.phase, "axis": row.axis, "transport": row.transport}
        one = found.setdefault(tuple(key.values()), {**key, "count": 0, "bytes": 0})
        one["count"] += row.count
        one["bytes"] += row.bytes
    return list(found.values())


def _options(lines: tuple[str, ...]) -> list[tuple[str, str]]:
    """Split `option name=value` lines into names and values."""
    pairs = (line.removeprefix("option ").partition("=") for line in lines)
    return [(name, value) for name, _, value in pairs]
