"""Report which parts of fxdp work on this machine, as plain text for an issue; exit code 1 if one fails."""

from fxdp.cli.doctor.command import declare, run

__all__ = ["declare", "run"]
