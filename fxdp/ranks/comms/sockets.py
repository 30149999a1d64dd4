"""The connections that gloo opened for a process group, so that they can be cut.

gloo has no abort: a rank that waits in a collective stays there until a connection breaks. So the sockets
that appear while a group is made are recorded, by inode so that a reused descriptor is never mistaken for
one, and `cut` shuts their reading side: every wait in the group here then ends with an error. (The writing
side stays open: gloo loses a send that fails at once, and its wait never ends.)
This works where /proc exists (Linux); elsewhere nothing is recorded and a wait ends by timeout.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
from dataclasses import dataclass

from fxdp.errors import RankFailedError
from fxdp.ranks.comms.channel import Channel
from fxdp.ranks.liveness.departure import not_understood

_DESCRIPTORS = "/proc/self/fd"
_HASH = struct.Struct("<Q")


@dataclass(frozen=True)
class OpenSocket:
    """An open TCP connection of this process."""

    descriptor: int
    inode: str
    here: tuple[str, int]
    there: tuple[str, int]


def open_sockets() -> set[OpenSocket]:
    """Return all connected TCP sockets of this process."""
    found: set[OpenSocket] = set()
    if not os.path.isdir(_DESCRIPTORS):
        return found
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):
            inode = _inode(int(name))
            if not inode.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                    continue
                found.add(OpenSocket(int(name), inode, copy.getsockname()[:2], copy.getpeername()[:2]))
    return found


def cut(sockets: set[OpenSocket]) -> None:
    """Shut the reading side of those `sockets` that are still open."""
    for item in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(item.descriptor)) as copy:
            if _inode(item.descriptor) == item.inode == _inode(copy.fileno()):
                copy.shutdown(socket.SHUT_RD)


def _inode(descriptor: int) -> str:
    return os.readlink(f"{_DESCRIPTORS}/{descriptor}")


def shared_sockets(control: Channel, opened: set[OpenSocket]) -> set[OpenSocket]:
    """Return the `opened` sockets whose other end was opened by a rank of this mesh meanwhile."""
    mine = {_hash(item.here, item.there): item for item in opened}
    theirs: set[int] = set()
    for rank, data in enumerate(control.exchange(struct.pack(f"<{len(mine)}Q", *mine))):
        if len(data) % _HASH.size:
            raise RankFailedError(not_understood(rank, f"{len(data)} bytes"))
        if rank != control.rank:
            theirs.update(number for (number,) in _HASH.iter_unpack(data))
    return {item for item in opened if _hash(item.there, item.here) in theirs}


def _hash(here: tuple[str, int], there: tuple[str, int]) -> int:
    """Return 8 bytes that identify the two ends of a connection, short enough to send all to all ranks."""
    text = f"{here[0]} {here[1]} {there[0]} {there[1]}"
    number: int = _HASH.unpack(hashlib.sha256(text.encode()).digest()[: _HASH.size])[0]
    return number
