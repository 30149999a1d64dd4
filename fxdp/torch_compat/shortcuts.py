"""Which shortcuts are on: a release of torch that fxdp does not know costs time, not the result.

    @shortcut("memoized_trees")                 with memoized_trees():      on: torch's function is replaced
    def memoized_trees() -> Iterator[None]:                              off: torch's own runs, one debug line
        ...

A shortcut is off where `FXDP_SHORTCUTS` says so, where it was not proven with the installed release, and
where a name inside of torch that it builds on is gone or has another signature.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from fxdp.errors import MeshError
from fxdp.settings import ShortcutSettings
from fxdp.torch_compat import releases
from fxdp.torch_compat.shortcut_table import SHORTCUTS, Shortcut

__all__ = ["Shortcut", "is_on", "shortcuts", "why_off"]

_log = logging.getLogger("fxdp")


def shortcuts() -> tuple[Shortcut, ...]:
    """All of them, sorted by name."""
    return tuple(sorted(SHORTCUTS, key=lambda one: one.name))


def why_off(shortcut: Shortcut) -> str | None:
    """Why a shortcut is left out, one line for people; None: it is on.

    Raises
    ------
    MeshError : `FXDP_SHORTCUTS` names a shortcut that there is not.
    """
    settings = ShortcutSettings.from_environment()
    unknown = sorted(settings.off.keys() - {known.name for known in shortcuts()})
    if unknown:
        raise MeshError(
            f"environment variable FXDP_SHORTCUTS names {', '.join(unknown)}; expected names of "
            f"shortcuts: {', '.join(known.name for known in shortcuts())}"
        )
    return settings.why_off(shortcut.name) or _misfit(shortcut, releases.installed())


def is_on(name: str) -> bool:
    """Whether the shortcut of this name may be taken; one that may not says why, once in a process."""
    found = next(one for one in SHORTCUTS if one.name == name)
    why = why_off(found)
    if why is not None:
        _say(name, why)
    return why is None


def shortcut(
    name: str,
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], AbstractContextManager[None]]]:
    """Make a context manager of a generator, as `contextlib` does; one that does nothing where it is off."""

    def wrapped(make: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
        manager = contextlib.contextmanager(make)

        @functools.wraps(make)
        def entered() -> AbstractContextManager[None]:
            return manager() if is_on(name) else contextlib.nullcontext()

        return entered

    return wrapped


@functools.cache  # asked before the first replacement, as what is replaced has another signature
def _misfit(shortcut: Shortcut, version: str) -> str | None:
    release = releases.release(version)
    if release not in shortcut.releases:
        if shortcut.needless and release in releases.PROVEN:
            return f"torch saves this time itself since {shortcut.needless}"
        return f"it was not proven with torch {version}"
    if not releases.is_proven(version):
        return f"it was not proven with torch {version}, a preview"
    return next((misfit for name in shortcut.names if (misfit := name.misfit()) is not None), None)


@functools.cache
def _say(name: str, why: str) -> None:
    _log.debug("shortcut %s is off: %s", name, why)
