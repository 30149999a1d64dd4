"""Memory shared by several ranks of one host.

The memory is anonymous (`memfd_create`): no name can be left behind, no room in /dev/shm is needed, and the
memory is freed with its last user. Other ranks open the memory through /proc, which needs Linux and the
same user and process namespace; `transport/host_places.py` finds out which ranks can.
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
_SIZE = struct.Struct("<Q")  # bytes of the value in the buffer


@dataclass(eq=False)
class SharedBuffer:
    """Shared memory of this rank, with the data by which all ranks find it."""

    descriptor: int
    number: int
    mapped: mmap.mmap
    data: Tensor
    """All of the memory, as bytes; keeps the mapping alive."""

    @classmethod
    def make(cls, size: int, number: int, name: str = "fxdp") -> SharedBuffer:
        """Allocate memory of this size for good, so that a lack of memory is detected here.

        `name` is the name in the system's tables.

        Raises
        ------
        StateError : there is not enough memory.
        """
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a first write without memory would end the process
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            mapped = mmap.mmap(descriptor, size)
            return cls(descriptor, number, mapped, torch.frombuffer(mapped, dtype=torch.uint8))
        except OSError as error:
            os.close(descriptor)
            raise StateError(
                f"no room for {size} bytes of memory that ranks share ({error.strerror}); expected as much "
                "as the largest sum of gradients, three times per rank: give the machine or container more "
                "memory, lower bucket_cap_mb of fxdp.Communication, or set FXDP_SHARED_MEMORY=0"
            ) from error

    @property
    def where(self) -> bytes:
        """Data by which another process opens the buffer with `open_buffer`."""
        return WHERE.pack(os.getpid(), self.descriptor, self.number)


def open_buffer(where: bytes | memoryview) -> Tensor:
    """Return the buffer of another rank, as bytes."""
    process, descriptor, _ = WHERE.unpack(where)
    with opened(process, descriptor) as found:
        return torch.frombuffer(mmap.mmap(found, os.fstat(found).st_size), dtype=torch.uint8)


@contextlib.contextmanager
def opened(process: int, descriptor: int) -> Iterator[int]:
    """Open a buffer of another process, given the number of its descriptor there.

    Raises
    ------
    OSError : there is no such buffer, or it could shrink.
    """
    found = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # reading a truncated part would crash
        if not fcntl.fcntl(found, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(errno.EPERM, "it is not sealed, so it could shrink")
        yield found
    finally:
        os.close(found)


class BufferRotation:
    """Alternating buffers of this rank, and the buffers of all ranks on this host.

    Parameters
    ----------
    count : number of buffers.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._begun = 0
        self._made = 0
        self._own: list[SharedBuffer | None] = [None] * count
        self._seen: dict[tuple[int, int], tuple[bytes, Tensor]] = {}

    def next(self, size: int) -> tuple[int, SharedBuffer]:
        """Begin the next turn; return its number and its buffer, a new one if `size` bytes do not fit."""
        found, iteration = self.coming(size), self._begun % self._count
        self._begun += 1
        return iteration, found

    def coming(self, size: int) -> SharedBuffer:
        """Return the buffer of the turn that begins next."""
        iteration = self._begun % self._count
        found = self._own[iteration]
        if found is None or found.data.numel() < size:
            if found is not None:
                os.close(found.descriptor)
            self._made += 1
            found = self._own[iteration] = SharedBuffer.make(size, self._made)
        return found

    def own(self, iteration: int) -> SharedBuffer:
        """Return the buffer of a turn that has begun."""
        found = self._own[iteration]
        assert found is not None
        return found

    def meta(self, iteration: int, value: Tensor) -> memoryview:
        """Return the data by which all ranks find a value in the buffer of this turn."""
        return memoryview(self.own(iteration).where + _SIZE.pack(value.nbytes))

    def theirs(self, rank: int, iteration: int, meta: memoryview, own: Tensor) -> Tensor:
        """Return the buffer of another rank, opened once, with a value like this rank's own.

        Raises
        ------
        RankFailedError : the value has a different size.
        LinkBrokenError : the memory cannot be opened.
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
        """Release the buffers."""
        for buffer in self._own:
            if buffer is not None:
                with contextlib.suppress(OSError):
                    os.close(buffer.descriptor)
        self._own = [None] * self._count
        self._seen.clear()


def elements(data: Tensor, value: Tensor) -> Tensor:
    """Return the first bytes of a buffer as elements of the dtype of `value`."""
    return data[: value.nbytes].view(value.dtype)


def chunk(count: int, part: int, parts: int) -> slice:
    """Return the slice of `count` elements that one of several ranks sums."""
    return slice(count * part // parts, count * (part + 1) // parts)


def check_size(rank: int, size: int, own: int) -> None:
    """Refuse to sum values of different sizes (in bytes) on this and another rank.

    Raises
    ------
    RankFailedError : the sizes differ.
    """
    if size != own:
        raise RankFailedError(
            f"rank {rank} came to a sum with {size} bytes; expected {own} as here: the ranks' "
            "programs have come apart, because a rank left out a call or a backward, or by a bug in fxdp"
        )
