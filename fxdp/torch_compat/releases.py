"""The releases of torch with which fxdp is proven: the only list of releases in the library."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from fxdp.errors import UnsupportedTorchError, UntestedTorchWarning
from fxdp.settings import inductor_cache_asked, rank_asked, warns_untested

__all__ = ["OLDEST", "PROVEN", "check_torch", "installed", "is_proven", "release", "warn_untested"]

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

_PROVEN = f"torch {PROVEN[0]} to {PROVEN[-1]}"
_ASKED = f"torch>={OLDEST},<2.{int(PROVEN[-1].partition('.')[2]) + 1}"
_RELEASE = re.compile(r"(\d+)\.(\d+)")


def installed() -> str:
    """Return the version of the installed torch, as torch reports it: `2.15.0+cu132`."""
    return str(torch.__version__)


def release(version: str) -> str:
    """Return the release of a version: `2.15` for `2.15.0+cu132` and for `2.15.0a0+git1234567`.

    Raises
    ------
    ValueError : the text does not begin with two numbers.
    """
    found = _RELEASE.match(version)
    if found is None:
        raise ValueError(f"{version!r} is no version of torch; expected one like '2.15.0' or '2.15.0+cu132'")
    return f"{int(found[1])}.{int(found[2])}"


def is_proven(version: str | None = None) -> bool:
    """Return whether fxdp is proven with a version of torch (default: the installed version).

    A preview (`2.15.0a0`, `2.15.0.dev20261101`, `2.15.0rc1`) is never proven, because torch may still change
    before the release.
    """
    version = installed() if version is None else version
    public = version.partition("+")[0]
    return release(version) in PROVEN and re.fullmatch(r"[\d.]+", public) is not None


def check_torch() -> None:
    """Raise if the installed torch cannot run fxdp, before the import of a missing name fails.

    Raises
    ------
    UnsupportedTorchError : torch is too old, has a version that cannot be parsed, or was built without
        `torch.distributed`; or Inductor's cache, which torch opens on import, cannot be a folder.
    """
    version = installed()
    try:
        known = _numbers(release(version)) >= _numbers(OLDEST)
    except ValueError as error:
        raise UnsupportedTorchError(f"{error}; fxdp works with {_PROVEN}") from None
    if not known:
        raise UnsupportedTorchError(
            f"torch {version} is installed; fxdp works with {_PROVEN}: pip install -U '{_ASKED}'"
        )
    if not dist.is_available():
        raise UnsupportedTorchError(
            f"torch {version} was built without torch.distributed, which fxdp needs for its ranks (and for "
            f"DTensor on a single one): install a build with it, such as PyPI's: pip install -U '{_ASKED}'"
        )
    _check_folder(inductor_cache_asked())


def _check_folder(path: str | None) -> None:
    """Raise if torch cannot create Inductor's cache folder.

    Torch creates this folder on import, and a failure there raises an error that does not name the cause.
    """
    if path is None:
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnsupportedTorchError(
            f"TORCHINDUCTOR_CACHE_DIR is {path!r}, where torch cannot keep what it compiles: "
            f"{error.strerror}; expected a folder that can be written, or that can be made"
        ) from None


def warn_untested(depth: int) -> None:
    """Call `check_torch`, and warn once, on rank 0, if the installed torch is not proven.

    `FXDP_UNTESTED_TORCH=1` turns the warning off. The warning points to the user's line, `depth` calls above
    the caller.
    """
    check_torch()
    if is_proven(installed()) or not warns_untested():
        return
    for text in _news(installed()):
        warnings.warn(text, UntestedTorchWarning, stacklevel=2 + depth)


@functools.cache
def _news(version: str) -> Iterator[str]:
    """Return the warning about an unproven torch, once per process and on rank 0 alone."""
    rank = dist.get_rank() if dist.is_initialized() else rank_asked()
    text = (
        f"fxdp is proven with {_PROVEN}; this is {version}: `fxdp doctor` says in a minute what of it works "
        "here. What only saves time is off"
    )
    return iter((text,) if rank == 0 else ())


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))
