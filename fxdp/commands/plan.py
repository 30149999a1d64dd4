"""`fxdp plan module:factory --mesh dp=64`: what a step exchanges, and what does not split."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from fxdp.commands.show import show, show_json
from fxdp.commands.target import declare_target, load_target, parse_mesh
from fxdp.dry_run import dry_run
from fxdp.options import Options
from fxdp.plan import Plan
from fxdp.report.text import communication_table, format_bytes, timings_line

HELP = "what a step of a model exchanges on a mesh and why, without a process group"


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    declare_target(parser, mesh="dp=2")
    parser.add_argument("--text", action="store_true", help="show the program of a rank, too")
    parser.add_argument("--values", action="store_true", help="one row per value instead of per bucket")


def run(asked: argparse.Namespace) -> int:
    """Plan and show; the factory's batch is that of one rank."""
    target = load_target(asked)
    options = Options(**target.options)
    plan = dry_run(target.model, target.args, target.kwargs, parse_mesh(asked.mesh), options)
    if asked.json:
        show_json(_as_dict(plan, text=asked.text))
        return 0
    if asked.text:
        show(plan.text)
    show(
        communication_table(plan.causes if asked.values else plan.communication),
        plan.coverage(),
        f"gradients: {format_bytes(plan.gradient_bytes)} per step",
        timings_line(plan.timings),
    )
    return 0


def _as_dict(plan: Plan, *, text: bool) -> dict[str, object]:
    return {
        "communication": [asdict(row) for row in plan.communication],
        "causes": [asdict(row) for row in plan.causes],
        "gradient_bytes": plan.gradient_bytes,
        "coverage": plan.coverage().as_dict(),
        "nodes": plan.nodes,
        "timings": dict(plan.timings),
        **({"text": plan.text} if text else {}),
    }
