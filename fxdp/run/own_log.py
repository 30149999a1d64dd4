"""The log of fxdp while a script runs: its warnings on standard error, nothing in the script's own log."""

from __future__ import annotations

import logging


def keep_log_apart() -> None:
    """Keep messages of fxdp out of the handlers that a script gives the root logger.

    What `TORCH_LOGS` asks for stays as it is.
    """
    logger = logging.getLogger("fxdp")
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
