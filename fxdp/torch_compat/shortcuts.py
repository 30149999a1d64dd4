"""Decide which shortcuts are on: with an unproven release of torch, fxdp is slower but the results are equal.

    @shortcut("lazy_codegen")                   with lazy_codegen():        on: torch's function is replaced
    def lazy_codegen() -> Iterator[None]:                                off: torch's own runs, one debug line
        ...

A shortcut is off if `FXDP_SHORTCUTS` says so, if the shortcut is not proven with the installed release, or if
a torch name that the shortcut builds on is gone or has a different signature.
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
    """Return all shortcuts, sorted by name."""
    return tuple(sorted(SHORTCUTS, key=lambda one: one.name))


def why_off(shortcut: Shortcut) -> str | None:
    """Return the reason why a shortcut is off, in one line for users; None if the shortcut is on.

    Raises
    ------
    MeshError : `FXDP_SHORTCUTS` contains an unknown name.
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
    """Return whether a shortcut is on; if not, log the reason once per process."""
    found = next(one for one in SHORTCUTS if one.name == name)
    why = why_off(found)
    if why is not None:
        _say(name, why)
    return why is None


def shortcut(
    name: str,
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], AbstractContextManager[None]]]:
    """Make a context manager of a generator, like `contextlib`; a no-op while the shortcut is off."""

    def wrapped(make: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
        manager = contextlib.contextmanager(make)

        @functools.wraps(make)
        def entered() -> AbstractContextManager[None]:
            return manager() if is_on(name) else contextlib.nullcontext()

        return entered

    return wrapped


@functools.cache  # called before the first replacement, because a replaced function has a different signature
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
