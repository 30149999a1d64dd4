"""The command line: `fxdp verify`, `plan`, `explain`, `rules`, `doctor`, `demo`; one file for each command.

Each command's file defines `declare(parser)` and `run(asked) -> exit code`; `parser.py` lists all commands.
"""

from fxdp.cli.parser import main

__all__ = ["main"]
