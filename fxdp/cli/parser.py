"""The command line: one subcommand, one file.

Exit codes: 0 done, 1 a check failed or a program crashed, 2 a mistake in what was asked for.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from rich.console import Console

from fxdp.demo.options import add_demo_arguments, demo_options
from fxdp.errors import FxdpError

_COMMANDS = ("verify", "plan", "explain", "rules")
"""Each is a file beside this one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    asked = _parser().parse_args(arguments)
    try:
        return _demo(asked, arguments) if asked.command == "demo" else int(asked.run(asked))
    except FxdpError as error:
        if asked.debug:
            raise
        Console(stderr=True).print(f"fxdp: error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fxdp", description="Automatic data parallelism for torch models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train a small GPT on real text on local ranks, beside one device",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_demo_arguments(demo)
    for name in _COMMANDS:
        module = importlib.import_module(f"fxdp.cli.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.declare(command)
        command.set_defaults(run=module.run)
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser


def _demo(asked: argparse.Namespace, arguments: Sequence[str]) -> int:
    from fxdp.demo.run import run_demo  # matplotlib-free, but it imports the compiler

    return run_demo(demo_options(asked), [sys.executable, "-m", "fxdp", *arguments])
