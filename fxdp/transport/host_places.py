"""Find the ranks that share memory: all ranks of a row, or the ranks of each of several hosts.

Each rank tries to open the memory of all ranks with the same process namespace, and reports which ranks
worked, and whether their memory can also be read directly. This detects a container in which /proc is
hidden, and hosts with equal names.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fxdp.errors import RankFailedError, StateError
from fxdp.ranks.comms.channel import Channel
from fxdp.ranks.liveness.departure import not_understood
from fxdp.transport.other_memory import OtherMemory
from fxdp.transport.shared_buffers import WHERE, SharedBuffer, open_buffer

_MARK, _SPACE = 16, 8
_PLACE = struct.Struct("<I")
_ADDRESS = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class HostPlaces:
    """The ranks of this rank's row that share memory, by place in the row.

    Attributes
    ----------
    hosts : the ranks of each host, the host of the first rank first; empty where no memory is to be shared.
    direct : True if the ranks of a host can also read one another's memory directly.
    """

    hosts: tuple[tuple[int, ...], ...] = ()
    direct: bool = False

    @property
    def one(self) -> bool:
        """True if all ranks share memory."""
        return len(self.hosts) == 1

    @property
    def several(self) -> bool:
        """True if there are several hosts, and several ranks on some."""
        return len(self.hosts) > 1 and any(len(host) > 1 for host in self.hosts)

    @property
    def shares(self) -> int:
        """Number of ranks per host that can exchange one share of a sum with a rank of each other host."""
        return min(map(len, self.hosts))

    def of(self, place: int) -> tuple[int, ...]:
        """Return the ranks on the host of a place."""
        return next(host for host in self.hosts if place in host)


def host_places(control: Channel, row: Sequence[int], wanted: bool) -> HostPlaces:
    """Find the ranks that share memory; all ranks call this together.

    `row` are the ranks of this row, numbered as in `control`. The result is equal in kind for all rows (one
    host, several, or none), as all rows run one program.
    """
    mark = os.urandom(_MARK)
    buffer = None
    if wanted and hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError, StateError):  # a sandbox may forbid it
            buffer = SharedBuffer.make(len(mark), 0)
            buffer.data.copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
    where = b"" if buffer is None else buffer.where + _ADDRESS.pack(buffer.data.data_ptr())
    found = control.exchange(mark + process_space() + where)
    seen = [place for place in row if _shows(found[place], process_space()) or place == control.rank]
    direct = bool(where) and all(_lies(found[place]) for place in seen)
    own = [row[0], direct, *(seen if where else ())]
    said = [_read(rank, part) for rank, part in enumerate(control.exchange(b"".join(map(_PLACE.pack, own))))]
    if buffer is not None:
        os.close(buffer.descriptor)
    rows: dict[int, list[int]] = {}
    for rank, (first, *_) in enumerate(said):
        rows.setdefault(first, []).append(rank)
    direct, seen_by = all(part[1] for part in said), {rank: tuple(part[2:]) for rank, part in enumerate(said)}
    each = [_hosts(members, {rank: seen_by[rank] for rank in members}, direct) for members in rows.values()]
    alike = all(one.one for one in each) or all(one.several for one in each)
    return each[list(rows).index(row[0])] if alike else HostPlaces()


def _hosts(row: Sequence[int], seen: Mapping[int, tuple[int, ...]], direct: bool) -> HostPlaces:
    """Return the hosts of a row; empty if ranks disagree on who shares memory."""
    for rank in row:
        if rank not in seen[rank] or any(seen.get(other) != seen[rank] for other in seen[rank]):
            return HostPlaces()
    place = {rank: i for i, rank in enumerate(row)}
    hosts = dict.fromkeys(tuple(place[other] for other in seen[rank]) for rank in row)
    return HostPlaces(tuple(hosts), direct)


def process_space() -> bytes:
    """Return a short hash of this process namespace; zeros if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            said = f"{file.read()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return bytes(_SPACE)
    return hashlib.sha256(said.encode()).digest()[:_SPACE]


def _shows(said: bytes, space: bytes) -> bool:
    """Return whether this process can open the memory of a rank and finds the rank's mark there."""
    where = said[_MARK + _SPACE :]
    if not where or said[_MARK : _MARK + _SPACE] != space:
        return False
    try:
        return bytes(open_buffer(where[: WHERE.size]).numpy()) == said[:_MARK]
    except (OSError, ValueError, struct.error):
        return False


def _lies(said: bytes) -> bool:
    """Return whether this process can read a rank's mark directly, by address."""
    where, to = said[_MARK + _SPACE :], torch.empty(_MARK, dtype=torch.uint8)
    process, _, _ = WHERE.unpack(where[: WHERE.size])
    (address,) = _ADDRESS.unpack(where[WHERE.size :])
    try:
        OtherMemory().read(process, [(address, to.data_ptr(), _MARK)])
    except OSError:  # not permitted, or no such system call
        return False
    return bytes(to.numpy()) == said[:_MARK]


def _read(rank: int, said: bytes) -> list[int]:
    if len(said) < 2 * _PLACE.size or len(said) % _PLACE.size:
        raise RankFailedError(not_understood(rank, f"{len(said)} bytes"))
    return [place for (place,) in _PLACE.iter_unpack(said)]
