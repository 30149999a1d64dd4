"""One TCP connection between every two ranks of a mesh, found through the process group's store.

Rank r listens, publishes its address, connects to all ranks below it and accepts all ranks above it:

    rank 0   accept 1, 2, 3
    rank 1   connect 0       accept 2, 3
    rank 2   connect 0, 1    accept 3
    rank 3   connect 0, 1, 2

Nobody connects to a higher rank, so no cycle of waiting can form.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from datetime import timedelta
from typing import Protocol

from fxdp.errors import MeshError, RankFailedError

_HELLO = struct.Struct("<16sI")  # the mesh's secret token, the rank that calls


class KeyValueStore(Protocol):
    """What is needed of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def add(self, key: str, value: int) -> int: ...  # noqa: D102
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...  # noqa: D102


def connect_all(
    store: KeyValueStore, prefix: str, rank: int, size: int, host: str, timeout_s: float
) -> dict[int, socket.socket]:
    """Connect this rank to all others; returns the non-blocking socket of each other rank.

    Parameters
    ----------
    store : a key-value store that all ranks share.
    prefix : a prefix for keys that nobody else uses, the same on all ranks.
    rank : this rank.
    size : how many ranks there are.
    host : the address at which the others reach this rank.
    timeout_s : seconds to wait for the others.

    Raises
    ------
    RankFailedError : a rank did not come within the time.
    MeshError : a rank's address cannot be reached.
    """
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        store.set(f"{prefix}/token", secrets.token_hex(16))
    with socket.create_server((host, 0), backlog=size) as listener:
        store.set(f"{prefix}/{rank}", f"{host} {listener.getsockname()[1]}")
        token = bytes.fromhex(_lookup(store, f"{prefix}/token", 0, deadline))
        sockets: dict[int, socket.socket] = {}
        for other in range(rank):
            address, port = _lookup(store, f"{prefix}/{other}", other, deadline).split()
            sockets[other] = _call(address, int(port), other, deadline)
            sockets[other].sendall(_HELLO.pack(token, rank))
        while len(sockets) < size - 1:
            caller, connection = _accept(listener, token, deadline)
            sockets[caller] = connection
    for connection in sockets.values():
        _tune(connection)
    return sockets


def own_address(master: str | None) -> str:
    """The address of the interface by which this machine reaches `master` (or, without one, itself)."""
    try:
        target = socket.gethostbyname(master or socket.gethostname())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # a datagram socket sends nothing on connect
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _lookup(store: KeyValueStore, key: str, rank: int, deadline: float) -> str:
    try:
        store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        return store.get(key).decode()
    except RuntimeError as error:
        raise RankFailedError(
            f"rank {rank} did not join the mesh in time; expected all ranks to call fxdp.compile with the "
            f"same mesh ({str(error).splitlines()[0]})"
        ) from error


def _call(address: str, port: int, rank: int, deadline: float) -> socket.socket:
    try:
        return socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic()))
    except OSError as error:
        raise MeshError(
            f"rank {rank} cannot be reached at {address}:{port} ({error}); expected an address that all "
            "ranks can reach: set FXDP_HOST on that rank to the right one of its addresses"
        ) from error


def _accept(listener: socket.socket, token: bytes, deadline: float) -> tuple[int, socket.socket]:
    """The next caller that knows the token; strangers are turned away."""
    while True:
        listener.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except OSError as error:
            raise RankFailedError(f"a higher rank did not connect in time ({error})") from error
        connection.settimeout(5.0)
        try:
            hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:
            hello = b""
        if len(hello) == _HELLO.size and secrets.compare_digest(_HELLO.unpack(hello)[0], token):
            return int(_HELLO.unpack(hello)[1]), connection
        connection.close()


def _tune(connection: socket.socket) -> None:
    """Small messages at once; a machine that went away is noticed after 25 s."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
