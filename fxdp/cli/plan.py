"""`fxdp plan module:factory --mesh pp=2,dp=4`: what a step exchanges, what does not split, and its stages."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fxdp.cli.show import show, show_json
from fxdp.cli.target import declare_target, load_target, parse_mesh
from fxdp.module.dry_run import dry_run
from fxdp.options import Options
from fxdp.reports.plan import Plan
from fxdp.reports.rows import format_bytes
from fxdp.reports.schedule_text import schedule_text
from fxdp.reports.tables import communication_table, stage_table, timings_line


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    declare_target(parser, mesh="dp=2")
    parser.add_argument("--text", action="store_true", help="show the program of a rank, too")
    parser.add_argument("--values", action="store_true", help="one row per value instead of per bucket")
    parser.add_argument("--microbatches", type=int, metavar="N", help="parts of a rank's batch per step")
    parser.add_argument("--schedule", metavar="NAME", help="1f1b (default), gpipe, ... or a CSV file")
    parser.add_argument("--stages", metavar="N", help="how many, or the modules that begin one: a,b")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture of the schedule")


def run(asked: argparse.Namespace) -> int:
    """Plan and show; the factory's batch is that of one rank."""
    target = load_target(asked)
    options = Options(**{**target.options, **_staging(asked)})
    plan = dry_run(target.model, target.args, target.kwargs, parse_mesh(asked.mesh), options)
    if asked.svg:
        asked.svg.write_text(plan.schedule_svg())
    if asked.json:
        show_json(_as_dict(plan, text=asked.text))
        return 0
    if asked.text:
        show(plan.text)
    if plan.schedule is not None:
        show(stage_table(plan.stages), f"schedule {plan.schedule.name}", plan.timetable())
    show(
        communication_table(plan.causes if asked.values else plan.communication),
        plan.coverage(),
        f"gradients: {format_bytes(plan.gradient_bytes)} per step",
        timings_line(plan.timings),
    )
    return 0


def _staging(asked: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of stages and micro-batches; it goes before the factory's options."""
    names = ("microbatches", "schedule", "stages")
    found = {name: value for name in names if (value := getattr(asked, name)) is not None}
    if "stages" in found:
        text = found["stages"]
        found["stages"] = int(text) if text.isdecimal() else text.split(",")
    return found


def _as_dict(plan: Plan, *, text: bool) -> dict[str, object]:
    return {
        "communication": [asdict(row) for row in plan.communication],
        "causes": [asdict(row) for row in plan.causes],
        "gradient_bytes": plan.gradient_bytes,
        "coverage": plan.coverage().as_dict(),
        "nodes": plan.nodes,
        "timings": dict(plan.timings),
        "stages": [asdict(row) for row in plan.stages],
        "schedule": [] if plan.schedule is None else schedule_text(plan.schedule).splitlines(),
        **({"text": plan.text} if text else {}),
    }
