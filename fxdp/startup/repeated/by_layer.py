"""Run a step of compilation on a program with few layers, and restore the others in the result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from fxdp.startup.repeated.alike_layers import OtherLayersError

_log = logging.getLogger("fxdp")
_Few = TypeVar("_Few")
_Made = TypeVar("_Made")


def by_layer(
    reduce: Callable[[int], _Few], run: Callable[[_Few], _Made], expand: Callable[[_Few, _Made], _Made]
) -> _Made | None:
    """Return the expanded result of a run on the reduced program; None, and a line of the log, if one fails.

    `reduce` takes the number of equal layers to keep at each end. More are tried once, because values that
    all layers read, and gradients of these, may make layers near the ends different.
    """
    why = ""  # not the error, whose traceback would keep all values of these frames
    for kept in (2, 3):
        try:
            few = reduce(kept)
        except Exception as error:  # a shortcut may not decide whether a program runs
            why = _words(error)
            break
        made = run(few)
        try:
            return expand(few, made)
        except OtherLayersError as error:
            why = _words(error)
        except Exception as error:
            why = _words(error)
            break
    _log.debug("%s", why)
    return None


def _words(error: Exception) -> str:
    if isinstance(error, OtherLayersError):
        return f"all layers are taken one by one: {error}"
    return f"repeated layers are left out, for a bug in fxdp: {error!r}"
