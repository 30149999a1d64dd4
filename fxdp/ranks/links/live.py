"""The links of this process: found again by later modules, given up in forked children, closed at exit."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence

from fxdp.ranks.links.links import Links

_live: weakref.WeakSet[Links] = weakref.WeakSet()


def remember(links: Links) -> Links:
    """Links that were opened just now."""
    _live.add(links)
    return links


def live_links() -> list[Links]:
    """The links of this process that are still in use."""
    return [links for links in _live if links.alive]


def speaking_links() -> list[Links]:
    """The links whose other ranks have not been told yet that this one ends.

    Those of a process group that was destroyed a moment ago, too, as in a `finally` on the way of an error.
    """
    return [links for links in _live if not links.control.silent]


def find_links(ranks: Sequence[int], row: Sequence[int], backend: str) -> Links | None:
    """The links that already join `ranks`, None if there are none or they have ended."""
    key = (tuple(ranks), tuple(row), backend)
    return next((links for links in live_links() if links.ending is None and links.key == key), None)


def _leave_to_parent() -> None:
    """A forked child (a data loader's worker) is no rank: it must neither say goodbye for its parent nor keep
    the connections open when that is killed."""
    for links in list(_live):
        links.control.abandon()
        links.messages.abandon()
        if links.hosts is not None:
            links.hosts.messages.abandon()
    _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _say_goodbye() -> None:
    for links in list(_live):
        links.outlast()
        links.close()
