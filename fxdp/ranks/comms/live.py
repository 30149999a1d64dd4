"""The links of this process: found again by later modules, given up in forked children, closed at exit."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence

from fxdp.ranks.comms.comms import Comms

_live: weakref.WeakSet[Comms] = weakref.WeakSet()


def remember(comms: Comms) -> Comms:
    """Links that were opened just now."""
    _live.add(comms)
    return comms


def live_comms() -> list[Comms]:
    """The links of this process that are still in use."""
    return [comms for comms in _live if comms.alive]


def speaking_comms() -> list[Comms]:
    """The links whose other ranks have not been told yet that this one ends.

    Those of a process group that was destroyed a moment ago, too, as in a `finally` on the way of an error.
    """
    return [comms for comms in _live if not comms.control.silent]


def find_comms(ranks: Sequence[int], row: Sequence[int], backend: str) -> Comms | None:
    """The links that already join `ranks`, None if there are none or they have ended."""
    key = (tuple(ranks), tuple(row), backend)
    return next((comms for comms in live_comms() if comms.departure is None and comms.key == key), None)


def _leave_to_parent() -> None:
    """A forked child (a data loader's worker) is no rank: it must neither say goodbye for its parent nor keep
    the connections open when that is killed."""
    for comms in list(_live):
        comms.control.abandon()
        comms.messages.abandon()
        if comms.hosts is not None:
            comms.hosts.messages.abandon()
    _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _say_goodbye() -> None:
    for comms in list(_live):
        comms.outlast()
        comms.close()
