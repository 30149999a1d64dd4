"""TCP connections between the ranks of a mesh, with addresses from the process group's store.

Rank r listens, publishes its address, calls all ranks below and answers all ranks above:

    rank 0   answer 1, 2, 3
    rank 1   call 0           answer 2, 3
    rank 2   call 0, 1        answer 3
    rank 3   call 0, 1, 2

No rank calls a higher rank, so there can be no cycle of waits. Two ranks have one connection for each plane
(purpose) that both belong to.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence

from fxdp.errors import MeshError
from fxdp.ranks.comms.accepting import Rendezvousing
from fxdp.ranks.comms.addresses import Addresses
from fxdp.ranks.comms.descriptors import as_limit
from fxdp.ranks.comms.interfaces import resolved
from fxdp.ranks.liveness.failure_broadcast import KeyValueStore

_BACKLOG = 128  # callers queued by the kernel: beyond, a caller waits a second or more
_QUESTIONS = 5  # unanswered probes after which a silent machine counts as lost


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
    """Connect this rank to all ranks; return for each plane a dict from rank to non-blocking socket.

    Parameters
    ----------
    store : a key-value store that all ranks share.
    prefix : a unique prefix for keys, equal on all ranks.
    rank : this rank.
    planes : the ranks to connect on each plane, including this one; the first plane has all ranks.
    host : the address at which all ranks reach this rank.
    timeout_s : seconds in which all ranks must join.
    look : called about twice a second; may raise an error that a rank has reported.
    lost_s : seconds after which connections to a silent machine end.
    tree_above : a setting that must be equal on all ranks.

    Raises
    ------
    RankFailedError : a rank failed, died or was late; all missing ranks are named.
    MeshError : a rank's address cannot be reached, or the rank runs a different version of fxdp.
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
    """Return the connections of `accepting`, with socket options set."""
    found = accepting.run(listener)
    for plane in found:
        for connection in plane.values():
            _tune(connection, lost_s)
    return found


@contextlib.contextmanager
def listening(host: str, size: int) -> Iterator[socket.socket]:
    """Listen at this address; turn a system error due to too many open files into a `MeshError`."""
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
    """Send small messages at once, and end the connection if the peer's machine is silent for `lost_s`.

    The kernel answers for a stopped or busy process: only a lost machine or network is silent.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    asked = max(1, int(lost_s / _QUESTIONS))  # for idle connections
    options = {
        "TCP_KEEPIDLE": asked,
        "TCP_KEEPINTVL": asked,
        "TCP_KEEPCNT": _QUESTIONS - 1,
        "TCP_USER_TIMEOUT": max(1, int(lost_s * 1000)),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
