"""`fxdp plan module:factory --mesh pp=2,dp=4`: what a step exchanges, what does not split, and its stages."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fxdp.cli.show import prints, show, show_json, working
from fxdp.cli.target import declare_target, load_target, mesh_asked
from fxdp.errors import CaptureError
from fxdp.module.dry_run import dry_run
from fxdp.options import Options
from fxdp.reports.plan import Plan
from fxdp.reports.plan_summary import Summary


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    declare_target(parser, mesh="dp=2")
    parser.add_argument("--text", action="store_true", help="show the program of a rank, too")
    parser.add_argument("--values", action="store_true", help="value by value, no layers in one row")
    parser.add_argument("--microbatches", type=int, metavar="N", help="parts of a rank's batch per step")
    parser.add_argument("--schedule", metavar="NAME", help="1f1b (default), gpipe, ... or a CSV file")
    parser.add_argument("--stages", metavar="N", help="how many, or the modules that begin one: a,b")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write all of it as a page for a browser")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture of the schedule")


def run(asked: argparse.Namespace) -> int:
    """Plan and show; the factory's batch is that of one rank."""
    target = load_target(asked)
    options = Options.named({**target.options, **_staging(asked)})
    mesh = mesh_asked(asked)
    try:
        with working(f"planning {type(target.model).__name__} on {asked.mesh}"):
            plan = dry_run(target.model, target.args, target.kwargs, mesh, options, target.origin)
    except CaptureError as error:
        if isinstance(error.plan, Plan):  # what is known, with the error in its place
            _write(error.plan, asked)
        raise
    if asked.svg and prints():
        plan.to_svg(asked.svg)
    _write(plan, asked)
    if asked.json:
        return 0
    if asked.text:
        show(plan.text)
    show(Summary(plan, fold=not asked.values))
    return 0


def _write(plan: Plan, asked: argparse.Namespace) -> None:
    if asked.html and prints():
        plan.to_html(asked.html)
    if asked.json:
        show_json({name: value for name, value in plan.as_dict().items() if asked.text or name != "text"})


def _staging(asked: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of stages and micro-batches; it goes before the factory's options."""
    names = ("microbatches", "schedule", "stages")
    found = {name: value for name in names if (value := getattr(asked, name)) is not None}
    if "stages" in found:
        text = found["stages"]
        found["stages"] = int(text) if text.isdecimal() else text.split(",")
    return found
