"""The command line: `fxdp verify`, `plan`, `explain`, `rules`, `doctor`, `demo`; one file each.

Each file of a command has `declare(parser)` and `run(asked) -> exit code`; `parser.py` has a line on each.
"""

from fxdp.cli.parser import main

__all__ = ["main"]
