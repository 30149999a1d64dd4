"""`fxdp plan module:factory --mesh pp=2,dp=4`: show the communication of a step, coverage and stages."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fxdp.cli.show import columns, prints, show, show_json, working
from fxdp.cli.target import declare_target, load_target, mesh_asked
from fxdp.errors import CaptureError, InputError
from fxdp.module.dry_run import dry_run
from fxdp.options import Options
from fxdp.reports.page.plan_page import check_file
from fxdp.reports.plan import Plan
from fxdp.reports.plan_data.plan_diff import PlanDiff
from fxdp.reports.plan_summary import Summary


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    declare_target(parser, mesh="dp=2")
    parser.add_argument("--text", action="store_true", help="show the program of a rank, too")
    parser.add_argument("--values", action="store_true", help="value by value, no layers in one row")
    parser.add_argument("--microbatches", type=int, metavar="N", help="parts of a rank's batch per step")
    parser.add_argument("--schedule", metavar="NAME", help="1f1b (default), gpipe, ... or a CSV file")
    parser.add_argument("--stages", metavar="N", help="how many, or the modules that begin one: a,b")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write all of it as a page for a browser")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture of the schedule")
    parser.add_argument("--diff", type=Path, metavar="FILE", help="what differs from a plan --json wrote")


def run(asked: argparse.Namespace) -> int:
    """Plan and show; the factory's batch is the batch of one rank."""
    for path in (asked.html, asked.svg):
        if path is not None and prints():
            check_file(path)
    other = None if asked.diff is None else _other(asked.diff)
    target = load_target(asked)
    options = Options.named(target.options)
    options = replace(options, pipeline=replace(options.pipeline, **_staging(asked)))
    mesh = mesh_asked(asked)
    try:
        with working(f"planning {type(target.model).__name__} on {asked.mesh}"):
            plan = dry_run(target.model, target.args, target.kwargs, mesh, options, target.origin)
    except CaptureError as error:
        if isinstance(error.plan, Plan):  # the known part of the plan, with the error
            _write(error.plan, asked)
            if asked.json:
                _show_as_json(error.plan, asked)
        raise
    _write(plan, asked)
    if other is not None:
        _show_differences(plan.diff(other), asked)
    elif asked.json:
        _show_as_json(plan, asked)
    else:
        show(*([plan.text] if asked.text else []), Summary(plan, fold=not asked.values))
    return 0


def _write(plan: Plan, asked: argparse.Namespace) -> None:
    if asked.svg and prints() and not plan.error:
        plan.to_svg(asked.svg)
    if asked.html and prints():
        plan.to_html(asked.html)


def _show_as_json(plan: Plan, asked: argparse.Namespace) -> None:
    show_json({name: value for name, value in plan.as_dict().items() if asked.text or name != "text"})


def _other(path: Path) -> Plan:
    """Read a plan from a file.

    Raises
    ------
    InputError : the file does not exist, or does not contain a plan of this version.
    """
    try:
        return Plan.from_json(path.read_text())
    except (OSError, InputError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"--diff {path}: {why}. Expected a file that fxdp plan --json wrote") from error


def _show_differences(found: PlanDiff, asked: argparse.Namespace) -> None:
    """Show one line per difference; `here` is this plan, `there` the plan of the file."""
    if asked.json:
        show_json([asdict(row) for row in found.rows])
        return
    for line in str(found).splitlines():
        show("\n".join(textwrap.wrap(line, columns(), subsequent_indent="    ", break_long_words=False)))


def _staging(asked: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `fxdp.Pipeline` on the command line, which override the factory's."""
    names = ("microbatches", "schedule", "stages")
    found = {name: value for name in names if (value := getattr(asked, name)) is not None}
    if "stages" in found:
        text = found["stages"]
        found["stages"] = int(text) if text.isdecimal() else text.split(",")
    return found
