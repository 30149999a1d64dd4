"""The `Comms` of this process: reused by later modules, abandoned in forked children, closed at exit."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence

from fxdp.ranks.comms.comms import Comms

_live: weakref.WeakSet[Comms] = weakref.WeakSet()


def remember(comms: Comms) -> Comms:
    """Register a new `Comms`."""
    _live.add(comms)
    return comms


def live_comms() -> list[Comms]:
    """Return the `Comms` of this process that are still in use."""
    return [comms for comms in _live if comms.alive]


def speaking_comms() -> list[Comms]:
    """Return each `Comms` on which this rank has not announced its end yet.

    This includes a process group that was destroyed a moment ago, as in a `finally` while an error
    propagates.
    """
    return [comms for comms in _live if not comms.control.silent]


def find_comms(ranks: Sequence[int], row: Sequence[int], backend: str) -> Comms | None:
    """Return the existing `Comms` between `ranks`; None without one, or if the connections are closed."""
    key = (tuple(ranks), tuple(row), backend)
    same = (comms for comms in live_comms() if comms.key == key)
    return next((comms for comms in same if comms.liveness.departure is None), None)


def _leave_to_parent() -> None:
    """Abandon connections in a forked child (a data loader's worker), which is no rank.

    The child must neither report the parent's end nor keep connections open when the parent is killed.
    """
    for comms in list(_live):
        comms.control.abandon()
        comms.messages.abandon()
        comms.transport.abandon()
    _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _say_goodbye() -> None:
    for comms in list(_live):
        comms.liveness.outlast()
        comms.liveness.close()
