"""Say what of fxdp works here, as plain text for an issue; exit code 1 where something does not."""

from fxdp.cli.doctor.command import declare, run

__all__ = ["declare", "run"]
