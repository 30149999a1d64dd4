"""`fxdp explain module:factory [words]`: why values are placed as they are and collectives exist."""

from __future__ import annotations

import argparse

from fxdp.cli.show import show, show_json
from fxdp.cli.target import declare_target, load_target, parse_mesh
from fxdp.module.dry_run import local_program
from fxdp.options import Options
from fxdp.reports.explain import explain


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    declare_target(parser, mesh="dp=2")
    parser.add_argument(
        "words",
        nargs="*",
        help="only nodes with all of these in their line, as mm, layers.0.attn or model.py:12",
    )
    parser.add_argument("--collectives", action="store_true", help="only what is communicated")


def run(asked: argparse.Namespace) -> int:
    """Explain the nodes that were asked for; none is an error."""
    target = load_target(asked)
    mesh, options = parse_mesh(asked.mesh), Options(**target.options)
    local, _ = local_program(target.model, target.args, target.kwargs, mesh, options)
    rows = [row for row in explain(local.causes, local.mesh.axes) if row.matches(asked.words)]
    rows = [row for row in rows if row.collective or not asked.collectives]
    if asked.json:
        show_json([row.as_dict() for row in rows])
    else:
        show(
            "\n".join(map(str, rows)) or f"no node of the program has {' and '.join(asked.words)} in its line"
        )
    return 0 if rows else 1
