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
from collections.abc import Callable, Sequence

from fxdp.errors import MeshError
from fxdp.ranks.links.addresses import Addresses
from fxdp.ranks.links.descriptors import as_limit
from fxdp.ranks.links.meeting import Meeting
from fxdp.ranks.links.notices import KeyValueStore

_BACKLOG = 128  # callers that the kernel keeps: beyond, one waits a second or more to be heard

def connect_all(
    store: KeyValueStore,
    prefix: str,
    rank: int,
    planes: Sequence[Sequence[int]],
    host: str,
    timeout_s: float,
    look: Callable[[], None] = lambda: None,
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

    Raises
    ------
    RankFailedError : a rank failed, died or did not come within the time; all that are missing are named.
    MeshError : a rank's address cannot be reached, or it runs another version of fxdp.
    """
    if len(planes[0]) == 1:
        return [{} for _ in planes]
    try:
        with _listen(host, len(planes[0])) as listener:
            found = Meeting(Addresses(store, prefix, timeout_s), rank, planes, look).run(host, listener)
    except OSError as error:
        if limit := as_limit(error, len(planes[0])):
            raise limit from error
        raise
    for plane in found:
        for connection in plane.values():
            _tune(connection)
    return found


def own_address(master: str | None) -> str:
    """The address of the interface by which this machine reaches `master` (or, without one, itself)."""
    for family, _, _, _, target in _resolved(master or socket.gethostname(), 9):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # a datagram socket sends nothing on connect
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _listen(host: str, size: int) -> socket.socket:
    for family, _, _, _, target in _resolved(host, 0):
        try:
            return socket.create_server((target[0], 0), family=family, backlog=max(size, _BACKLOG))
        except OSError as error:
            if found := as_limit(error, size):
                raise found from error
    raise MeshError(
        f"this machine cannot listen at {host}; expected one of its own addresses: set FXDP_HOST to one that "
        "the other ranks can reach"
    )


def _resolved(host: str, port: int) -> Sequence[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except OSError:
        return ()


def _tune(connection: socket.socket) -> None:
    """Small messages at once; a machine that went away is noticed after 25 s."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
