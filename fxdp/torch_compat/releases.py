"""The releases of torch that fxdp was proven with, one line each: the one place that knows them."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from fxdp.errors import UnsupportedTorchError, UntestedTorchWarning
from fxdp.settings import UntestedSettings, inductor_cache_asked

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


def check_torch() -> None:
    """Refuse a torch with which fxdp cannot work, before a name that it lacks does.

    Raises
    ------
    UnsupportedTorchError : torch is too old, of a version that cannot be read, or built without
        `torch.distributed`; or Inductor's cache, which torch opens when it is imported, cannot be a folder.
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
    """Torch makes this folder while it is imported, and fails in words of its own where it cannot."""
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
    """Refuse what `check_torch` does, and warn once, on rank 0, of a torch that fxdp was not proven with.

    `FXDP_UNTESTED_TORCH=1` says that this is known. The user's line is `depth` calls above the caller.
    """
    check_torch()
    if is_proven(installed()) or UntestedSettings.from_environment().known:
        return
    for text in _news(installed()):
        warnings.warn(text, UntestedTorchWarning, stacklevel=2 + depth)


@functools.cache
def _news(version: str) -> Iterator[str]:
    """What rank 0 says of this torch; there once in a process."""
    rank = dist.get_rank() if dist.is_initialized() else UntestedSettings.from_environment().rank
    text = (
        f"fxdp is proven with {_PROVEN}; this is {version}: `fxdp doctor` says in a minute what of it works "
        "here. What only saves time is off"
    )
    return iter((text,) if rank == 0 else ())


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))
