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
    cause: Exception = OtherLayersError()
    for kept in (2, 3):
        try:
            few = reduce(kept)
        except Exception as error:  # a shortcut may not decide whether a program runs
            cause = error
            break
        made = run(few)
        try:
            return expand(few, made)
        except OtherLayersError as error:
            cause = error
        except Exception as error:
            cause = error
            break
    if isinstance(cause, OtherLayersError):
        _log.debug("all layers are taken one by one: %s", cause)
    else:
        _log.debug("repeated layers are left out, for a bug in fxdp: %r", cause)
    return None
