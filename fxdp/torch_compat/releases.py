"""The releases of torch that fxdp was proven with, one line each: the one place that knows them."""

from __future__ import annotations

import re

import torch

__all__ = ["OLDEST", "PROVEN", "installed", "is_proven", "release"]

PROVEN: tuple[str, ...] = (
    "2.11",
    "2.12",
    "2.13",
    "2.14",
    "2.15",
)
"""The releases with which the tests passed, oldest first."""

OLDEST = PROVEN[0]
"""The oldest release with which fxdp works."""

_RELEASE = re.compile(r"(\d+)\.(\d+)")


def installed() -> str:
    """The version of the installed torch, as torch gives it: `2.15.0+cu132`."""
    return str(torch.__version__)


def release(version: str) -> str:
    """The release to which a version belongs: `2.15` for `2.15.0+cu132` and for `2.15.0a0+git1234567`.

    Raises
    ------
    ValueError : the text does not begin with two numbers.
    """
    found = _RELEASE.match(version)
    if found is None:
        raise ValueError(f"{version!r} is no version of torch; expected one like '2.15.0' or '2.15.0+cu132'")
    return f"{int(found[1])}.{int(found[2])}"


def is_proven(version: str | None = None) -> bool:
    """Whether fxdp was proven with a version of torch (default: the installed one); not with its previews.

    A preview (`2.15.0a0`, `2.15.0.dev20261101`, `2.15.0rc1`) may still change.
    """
    version = installed() if version is None else version
    public = version.partition("+")[0]
    return release(version) in PROVEN and re.fullmatch(r"[\d.]+", public) is not None
