"""The command line: one subcommand, one file.

Exit codes: 0 done, 1 a check failed or a program crashed, 2 the arguments have a mistake.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import importlib.metadata
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from fxdp import __version__
from fxdp.errors import FxdpError, RankFailedError

_COMMANDS = {
    "demo": "train a small GPT on real text on local ranks, beside one device",
    "run": "run a script for one device, unedited, on many ranks; its numbers are one device's",
    "port": "the edits by which a script does that by hand, and lines that need a look",
    "verify": "prove that the program of a model equals one device, on virtual ranks in this process",
    "plan": "what a step of a model exchanges on a mesh and why, without a process group",
    "explain": "why each value of a model is placed as it is, and why each collective exists",
    "rules": "list what fxdp does with each op of torch",
    "doctor": "what of fxdp works here: versions, shortcuts, a small model on ranks; text for an issue",
}
"""Commands; each is a file beside this one, imported on demand because torch alone takes seconds."""

_ELSEWHERE = {"run": "fxdp.run.command"}
"""Commands of wings."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, commands = _parser(arguments)
    asked, unknown = parser.parse_known_args(arguments)
    if unknown:  # told with the usage of the command, which argparse itself does not
        commands[asked.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if argv is None:
        atexit.register(gc.unfreeze)  # else nanobind, which binds triton 3.9, reports all objects as leaked
        gc.freeze()  # this process is the command: imported objects stay, so the collector may skip them
    try:
        return int(asked.run(asked))
    except FxdpError as error:
        if asked.debug:
            raise
        from rich.console import Console

        console = Console(stderr=True, emoji=False)  # `:x:` of a message would be a picture
        console.print(f"fxdp: error: {error}", style="red", markup=False, soft_wrap=True)
        return 1 if isinstance(error, RankFailedError) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if asked.command == "run" or not _reader_left():  # the script's error, or one of ranks
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written at the end
        return 1


def _reader_left() -> bool:
    """Return whether the output goes into a pipe that nobody reads any more, as behind `| head`."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def _parser(
    arguments: Sequence[str],
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Build the parser, and those of all commands, of which the one in the arguments has its options."""
    named = next((word for word in arguments if not word.startswith("-")), "")
    parser = argparse.ArgumentParser(prog="fxdp", description="Automatic data parallelism for torch models.")
    parser.add_argument("--version", action=_Version, nargs=0, help="fxdp's release and torch's")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name == named:
            module = _imported(_ELSEWHERE.get(name) or f"fxdp.cli.{name}")
            command.description = "\n".join(textwrap.wrap(module.__doc__.partition("\n")[0], 80))
            module.declare(command)
            command.set_defaults(run=module.run)
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser, commands.choices


class _Version(argparse.Action):
    """Action that prints the releases of fxdp and of torch without importing torch."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        try:
            torch = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch = "is not installed"
        parser.exit(0, f"fxdp {__version__}, torch {torch}\n")


def _imported(name: str) -> Any:
    """Import a module, and torch, without garbage collection, which would cost a second and free nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if collects:
            gc.enable()
