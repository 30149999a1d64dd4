"""Numbers in environment variables, each with its bounds."""

from __future__ import annotations

from collections.abc import Mapping

from fxdp.errors import MeshError

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MOST_RANKS = 1 << 20
_LONGEST = 1e7  # seconds, 115 days: longer timeouts overflow in socket calls


def integer(env: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """Return the value of a variable; raise `MeshError` if it is no integer in these bounds."""
    text = env.get(name)
    if not text:
        return default
    digits = text.isascii() and text.isdigit() and len(text) < 10  # rejects numbers of any length
    if not digits or not least <= int(text) <= most:
        raise MeshError(
            f"environment variable {name} is {text[:30]!r}; expected an integer from {least} to {most}"
            + (", as torchrun sets it" if name in LAUNCH_VARIABLES else "")
        )
    return int(text)


def number(env: Mapping[str, str], name: str, default: float) -> float:
    """Return the value of a variable; raise `MeshError` if it is no number, negative or too large."""
    text = env.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _LONGEST:
        raise MeshError(
            f"environment variable {name} is {text!r}; expected a number >= 0, and at most {_LONGEST:g}"
        )
    return value
