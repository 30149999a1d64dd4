"""Memory that several ranks of one host see.

The memory is anonymous (`memfd_create`): it has no name that could be left behind, needs no room in
/dev/shm, and is gone with its last user. Other ranks open it through /proc, which needs Linux and the same
user and process namespace; `probe` finds out whether all of them can.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxdp.errors import StateError
from fxdp.ranks.links.channel import Channel

WHERE = struct.Struct("<QQQ")  # process, descriptor, number of the buffer
_SEALS = fcntl.F_SEAL_SHRINK


@dataclass(eq=False)
class SharedBuffer:
    """Memory of this rank, and how others find it."""

    descriptor: int
    number: int
    data: Tensor

    @classmethod
    def make(cls, size: int, number: int) -> SharedBuffer:
        """Memory of this size, which stays: where there is no room for it, that is found out here.

        Raises
        ------
        StateError : no room.
        """
        descriptor = os.memfd_create("fxdp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a first write without room would end the process
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(descriptor, number, _map(descriptor, size))
        except OSError as error:
            os.close(descriptor)
            raise StateError(
                f"no room for {size} bytes of memory that ranks share ({error.strerror}); expected as much "
                "as the largest sum of gradients, twice per rank: give the machine or container more memory, "
                "lower bucket_mb of fxdp.compile, or set FXDP_SHARED_MEMORY=0"
            ) from error

    @property
    def where(self) -> bytes:
        """What other ranks need for `open_buffer`."""
        return WHERE.pack(os.getpid(), self.descriptor, self.number)


def _map(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def open_buffer(where: bytes | memoryview) -> Tensor:
    """The buffer of another rank, as bytes."""
    process, descriptor, _ = WHERE.unpack(where)
    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if not fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _SEALS:  # reading what was cut off ends this process
            raise OSError(errno.EPERM, "it is not sealed, so it could shrink")
        return _map(opened, os.fstat(opened).st_size)
    finally:
        os.close(opened)


def probe(control: Channel, row: Sequence[int], wanted: bool) -> bool:
    """Whether every rank wants to and can open the memory of the others in its row; all ranks must ask.

    `row` holds places among the ranks of `control`. All rows get the same answer, as their programs are one.
    """
    mark = os.urandom(16)
    buffer = None
    if wanted and hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError, StateError):  # a sandbox may forbid it
            buffer = SharedBuffer.make(len(mark), 0)
            buffer.data.copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
    found = control.exchange(mark + (b"" if buffer is None else buffer.where))
    seen = all(_shows(found[place][:16], found[place][16:]) for place in row)
    everybody = control.exchange(bytes([seen]))
    if buffer is not None:
        os.close(buffer.descriptor)
    return all(answer == b"\x01" for answer in everybody)


def _shows(mark: bytes, where: bytes) -> bool:
    if not where:
        return False
    try:
        return bytes(open_buffer(where).numpy()) == mark
    except (OSError, ValueError, struct.error):
        return False
