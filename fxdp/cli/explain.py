"""`fxdp explain module:factory [words]`: explain the placements of values and the reasons for collectives."""

from __future__ import annotations

import argparse
from dataclasses import replace

from fxdp.cli.show import columns, show, show_json, working
from fxdp.cli.target import declare_target, load_target, mesh_asked
from fxdp.errors import InputError
from fxdp.module.dry_run import dry_run
from fxdp.options import Options
from fxdp.reports.explained import Explained, explained
from fxdp.reports.plan_data.details import Details


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    declare_target(parser, mesh="dp=2")
    parser.add_argument(
        "words",
        nargs="*",
        help="a line (model.py:12), parameter, node, collective or module; or words of nodes' lines",
    )
    parser.add_argument("--collectives", action="store_true", help="only what is communicated")


def run(asked: argparse.Namespace) -> int:
    """Explain the subject; the exit code is 1 if the subject is unknown."""
    target = load_target(asked)
    mesh, options = mesh_asked(asked), Options.named(target.options)
    with working(f"planning {type(target.model).__name__} on {asked.mesh}"):
        plan = dry_run(target.model, target.args, target.kwargs, mesh, options, target.origin)
    try:
        found = _find(plan.details(), asked.words)
    except InputError as error:
        show(str(error))
        return 1
    if asked.collectives:
        found = replace(found, nodes=tuple(row for row in found.nodes if row.collective))
    if asked.json:
        show_json([row.as_dict() for row in found.nodes])
    else:
        show("\n".join(found.lines(columns())))
    return 0 if found else 1


def _find(details: Details, words: list[str]) -> Explained:
    """Return the subject named by one word, or all nodes with each of the words in their line."""
    if len(words) == 1:
        return explained(details, words[0])
    rows = tuple(row for row in details.explanations if row.matches(words))
    if not rows:
        raise InputError(f"no node of the program has {' and '.join(words)} in its line")
    return Explained(" ".join(words), rows)
