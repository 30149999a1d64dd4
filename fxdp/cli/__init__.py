"""The command line: `fxdp verify`, `fxdp plan`, `fxdp explain`, `fxdp rules`, `fxdp demo`; one file each.

Each file of a command has `HELP`, `declare(parser)` and `run(asked) -> exit code`.
"""

from fxdp.cli.parser import main

__all__ = ["main"]
