"""The releases of torch that fxdp was proven with, one line each: the one place that knows them.

Nothing here imports torch before it is known to be one that fxdp can work with.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
import warnings

from fxdp.errors import UnsupportedTorchError, UntestedTorchWarning
from fxdp.settings import UntestedSettings
from fxdp.version import __version__

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
_RELEASE = re.compile(r"(\d+)\.(\d+)")


def installed() -> str:
    """The version of the installed torch, as torch gives it: `2.15.0+cu132`.

    Raises
    ------
    UnsupportedTorchError : there is none.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        return str(torch.__version__)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedTorchError(
            f"torch is not installed; fxdp {__version__} works with {_PROVEN}: pip install 'torch>={OLDEST}'"
        ) from None


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
    """Refuse a torch with which fxdp cannot work, before its missing names do.

    Raises
    ------
    UnsupportedTorchError : torch is absent, too old, or built without `torch.distributed`.
    """
    _check(installed())


@functools.cache
def _check(version: str) -> None:
    if _numbers(release(version)) < _numbers(OLDEST):
        raise UnsupportedTorchError(
            f"torch {version} is installed; fxdp {__version__} works with {_PROVEN}: "
            f"pip install -U 'torch>={OLDEST}'"
        )
    import torch

    if not torch.distributed.is_available():
        raise UnsupportedTorchError(
            f"torch {version} was built without torch.distributed, which fxdp needs for its ranks (and for "
            "DTensor on a single one): install a build with it, such as PyPI's"
        )


def warn_untested() -> None:
    """Warn once in a process, on rank 0, of a torch that fxdp was not proven with.

    `FXDP_UNTESTED_TORCH=1` says that this is known.
    """
    version = installed()
    if not is_proven(version) and not UntestedSettings.from_environment().known:
        _warn(version)


@functools.cache
def _warn(version: str) -> None:
    import torch.distributed as dist

    settings = UntestedSettings.from_environment()
    rank = dist.get_rank() if dist.is_initialized() else settings.rank
    if rank == 0:
        warnings.warn(
            f"fxdp {__version__} is proven with {_PROVEN}; this is {version}: `fxdp doctor` says in a minute "
            "what of it works here. What only saves time is off",
            UntestedTorchWarning,
            stacklevel=5,
        )


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))
