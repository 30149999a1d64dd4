"""Memory that several ranks of one host see.

The memory is anonymous (`memfd_create`): it has no name that could be left behind, needs no room in
/dev/shm, and is gone with its last user. Other ranks open it through /proc, which needs Linux and the same
user and process namespace; `ranks/comms/host_places.py` finds out who can.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fxdp.errors import RankFailedError, StateError
from fxdp.ranks.comms.messages import LinkBrokenError

WHERE = struct.Struct("<QQQ")  # process, descriptor, number of the buffer
_SIZE = struct.Struct("<Q")  # bytes of the value in it
_SEALS = fcntl.F_SEAL_SHRINK


@dataclass(eq=False)
class SharedBuffer:
    """Memory of this rank, and how others find it."""

    descriptor: int
    number: int
    mapped: mmap.mmap
    data: Tensor
    """All of it, as bytes; it keeps what is mapped."""

    @classmethod
    def make(cls, size: int, number: int, name: str = "fxdp") -> SharedBuffer:
        """Memory of this size, which stays: where there is no room for it, that is found out here.

        `name` is what the system's tables call it.

        Raises
        ------
        StateError : no room.
        """
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a first write without room would end the process
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapped = mmap.mmap(descriptor, size)
            return cls(descriptor, number, mapped, torch.frombuffer(mapped, dtype=torch.uint8))
        except OSError as error:
            os.close(descriptor)
            raise StateError(
                f"no room for {size} bytes of memory that ranks share ({error.strerror}); expected as much "
                "as the largest sum of gradients, three times per rank: give the machine or container more "
                "memory, lower bucket_mb of fxdp.compile, or set FXDP_SHARED_MEMORY=0"
            ) from error

    @property
    def where(self) -> bytes:
        """What other ranks need for `open_buffer`."""
        return WHERE.pack(os.getpid(), self.descriptor, self.number)


def open_buffer(where: bytes | memoryview) -> Tensor:
    """The buffer of another rank, as bytes."""
    process, descriptor, _ = WHERE.unpack(where)
    with opened(process, descriptor) as found:
        return torch.frombuffer(mmap.mmap(found, os.fstat(found).st_size), dtype=torch.uint8)


@contextlib.contextmanager
def opened(process: int, descriptor: int) -> Iterator[int]:
    """A descriptor of the buffer that another process has by that number.

    Raises
    ------
    OSError : there is none, or it could shrink.
    """
    found = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if not fcntl.fcntl(found, fcntl.F_GET_SEALS) & _SEALS:  # reading what was cut off ends this process
            raise OSError(errno.EPERM, "it is not sealed, so it could shrink")
        yield found
    finally:
        os.close(found)


class BufferRotation:
    """Buffers of this rank that take turns, and those of other ranks of its host.

    Parameters
    ----------
    count : how many there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._begun = 0
        self._made = 0
        self._own: list[SharedBuffer | None] = [None] * count
        self._seen: dict[tuple[int, int], tuple[bytes, Tensor]] = {}

    def next(self, size: int) -> tuple[int, SharedBuffer]:
        """The turn that begins, and its buffer: a new one where there is none with room for `size` bytes."""
        found, iteration = self.coming(size), self._begun % self._count
        self._begun += 1
        return iteration, found

    def coming(self, size: int) -> SharedBuffer:
        """The buffer of the turn that begins next."""
        iteration = self._begun % self._count
        found = self._own[iteration]
        if found is None or found.data.numel() < size:
            if found is not None:
                os.close(found.descriptor)
            self._made += 1
            found = self._own[iteration] = SharedBuffer.make(size, self._made)
        return found

    def own(self, iteration: int) -> SharedBuffer:
        """The buffer of a turn that has begun."""
        found = self._own[iteration]
        assert found is not None
        return found

    def meta(self, iteration: int, value: Tensor) -> memoryview:
        """What the others must know to read a value in the buffer of this turn."""
        return memoryview(self.own(iteration).where + _SIZE.pack(value.nbytes))

    def theirs(self, rank: int, iteration: int, meta: memoryview, own: Tensor) -> Tensor:
        """Another rank's buffer, opened once, with a value like this rank's own.

        Raises
        ------
        RankFailedError : its value has another size.
        LinkBrokenError : its memory cannot be opened.
        """
        where, (size,) = meta[: WHERE.size], _SIZE.unpack(meta[WHERE.size :])
        check_size(rank, size, own.nbytes)
        known = self._seen.get((rank, iteration))
        if known is None or known[0] != where:
            try:
                known = self._seen[rank, iteration] = bytes(where), open_buffer(where)
            except (OSError, ValueError) as error:
                raise LinkBrokenError(f"the memory of rank {rank} cannot be opened: {error}") from error
            if known[1].numel() < size:
                raise LinkBrokenError(f"the memory of rank {rank} is smaller than it says")
        return known[1]

    def close(self) -> None:
        """Give the buffers back."""
        for buffer in self._own:
            if buffer is not None:
                with contextlib.suppress(OSError):
                    os.close(buffer.descriptor)
        self._own = [None] * self._count
        self._seen.clear()


def elements(data: Tensor, value: Tensor) -> Tensor:
    """The first bytes of a buffer as elements like those of `value`."""
    return data[: value.nbytes].view(value.dtype)


def chunk(count: int, part: int, parts: int) -> slice:
    """The elements, of so many, that one of several ranks sums."""
    return slice(count * part // parts, count * (part + 1) // parts)


def check_size(rank: int, size: int, own: int) -> None:
    """Refuse to sum this rank's value with another rank's of another size, both in bytes.

    Raises
    ------
    RankFailedError : it has another size.
    """
    if size != own:
        raise RankFailedError(
            f"rank {rank} came to a sum with {size} bytes; expected {own} as here: the ranks' "
            "programs have come apart, because a rank left out a call or a backward, or by a bug in fxdp"
        )
