"""List the rules for torch's ops: which run on each rank's part of the batch, and which run replicated."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from fxdp.errors import InputError
from fxdp.reports.sheet import Sheet
from fxdp.rules.op_table import counts, markdown, rule_rows, without_rule


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("word", nargs="?", default="", help="only ops and families that contain it")
    parser.add_argument(
        "--missing", action="store_true", help="the ops of the installed torch that have no rule instead"
    )
    parser.add_argument("--markdown", action="store_true", help="as the file fxdp/rules/TABLE.md")


def run(asked: argparse.Namespace) -> int:
    """Print the table."""
    missing = without_rule(asked.word)
    if asked.missing:
        sys.stdout.write("".join(f"{name}\n" for name in missing))
        return 0
    rows = rule_rows(asked.word)
    if not rows:
        raise InputError(
            f"rules {asked.word}: no op or family has this in its name. An op without a rule runs "
            "replicated on "
            "every rank; fxdp.register_rule gives it one"
        )
    if asked.markdown:
        sys.stdout.write(markdown(rows))
    else:
        totals = ", ".join(f"{n} {kind}" for kind, n in counts(rows).items())
        shown = tuple((row.op, row.family, row.kind) for row in rows)
        Console().print(Sheet("op rules", ("op", "=family", "=kind"), shown, f"{len(rows)} ops: {totals}"))
        if not asked.word:
            Console().print(
                f"{len(missing)} ops of the installed torch have no rule and run replicated on every rank: "
                "fxdp rules --missing"
            )
    return 0
