"""TCP connections between the ranks of a mesh, found through the process group's store.

Rank r listens, publishes its address, calls all ranks below it and answers all ranks above it:

    rank 0   answer 1, 2, 3
    rank 1   call 0           answer 2, 3
    rank 2   call 0, 1        answer 3
    rank 3   call 0, 1, 2

Nobody calls a higher rank, so no cycle of waiting can form. Two ranks have one connection for each plane
(what it is for) that both are in.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence

from fxdp.errors import MeshError
from fxdp.ranks.comms.accepting import Rendezvousing
from fxdp.ranks.comms.addresses import Addresses
from fxdp.ranks.comms.descriptors import as_limit
from fxdp.ranks.comms.failure_broadcast import KeyValueStore
from fxdp.ranks.comms.interfaces import resolved

_BACKLOG = 128  # callers that the kernel keeps: beyond, one waits a second or more to be heard
_QUESTIONS = 5  # that a silent machine leaves without an answer before it counts as lost


def connect_all(
    store: KeyValueStore,
    prefix: str,
    rank: int,
    planes: Sequence[Sequence[int]],
    host: str,
    timeout_s: float,
    look: Callable[[], None] = lambda: None,
    lost_s: float = 25.0,
    tree_above: int = 0,
) -> list[dict[int, socket.socket]]:
    """Connect this rank to all others; returns for each plane the non-blocking socket of each other rank.

    Parameters
    ----------
    store : a key-value store that all ranks share.
    prefix : a prefix for keys that nobody else uses, the same on all ranks.
    rank : this rank.
    planes : the ranks among which to connect, this one included; the first has all ranks.
    host : the address at which the others reach this rank.
    timeout_s : seconds to wait for the others.
    look : called about twice a second; may raise what the others have said meanwhile.
    lost_s : for how long another machine may be unheard of before its connections end.
    tree_above : a setting that must be the same on all ranks.

    Raises
    ------
    RankFailedError : a rank failed, died or did not come within the time; all that are missing are named.
    MeshError : a rank's address cannot be reached, or it runs another version of fxdp.
    """
    size = len(planes[0])
    if size == 1:
        return [{} for _ in planes]
    addresses = Addresses(store, prefix, timeout_s, size, tree_above, min(planes[0]))
    pairs = {(p, other) for p, among in enumerate(planes) for other in among if other != rank}
    below = {pair for pair in pairs if pair[1] < rank}
    with listening(host, size) as listener:
        addresses.publish(rank, host, listener.getsockname()[1])
        addresses.wait_for(sorted({other for _, other in below}), look)
        found = met(Rendezvousing(addresses, rank, below, pairs - below, look), listener, lost_s)
    return [*found, *({} for _ in planes[len(found) :])]


def met(accepting: Rendezvousing, listener: socket.socket, lost_s: float) -> list[dict[int, socket.socket]]:
    """The connections of a meeting, made ready."""
    found = accepting.run(listener)
    for plane in found:
        for connection in plane.values():
            _tune(connection, lost_s)
    return found


@contextlib.contextmanager
def listening(host: str, size: int) -> Iterator[socket.socket]:
    """A listener at this address; errors of the system inside that come of too many open files say so."""
    try:
        with _listen(host, size) as listener:
            yield listener
    except OSError as error:
        if limit := as_limit(error, size):
            raise limit from error
        raise


def _listen(host: str, size: int) -> socket.socket:
    for family, _, _, _, target in resolved(host, 0):
        try:
            return socket.create_server((target[0], 0), family=family, backlog=max(size, _BACKLOG))
        except OSError as error:
            if found := as_limit(error, size):
                raise found from error
    raise MeshError(
        f"this machine cannot listen at {host}; expected one of its own addresses: set FXDP_HOST to one that "
        "the other ranks can reach"
    )


def _tune(connection: socket.socket, lost_s: float) -> None:
    """Small messages at once; a machine that went away is noticed after `lost_s`.

    Its kernel answers for a process that is stopped or busy: only machines and networks can be lost so.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    asked = max(1, int(lost_s / _QUESTIONS))  # where nothing is under way whose answer could be missed
    options = {
        "TCP_KEEPIDLE": asked,
        "TCP_KEEPINTVL": asked,
        "TCP_KEEPCNT": _QUESTIONS - 1,
        "TCP_USER_TIMEOUT": max(1, int(lost_s * 1000)),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
