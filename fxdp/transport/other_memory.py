"""Direct reads of the memory of other processes on this host.

Linux copies the data in one step ("cross memory attach"), without a buffer in between. This requires the
right to trace the other process: the same user, and no rule against tracing (`kernel.yama.ptrace_scope`, a
sandbox). No rank writes into another process, so an invalid address does no harm.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from typing import TypeAlias

Stretch: TypeAlias = "tuple[int, int, int]"
"""Address in another process, address in this process, number of bytes."""
_STRETCHES = 1024
"""Stretches per system call, the system's limit."""


class _Vector(ctypes.Structure):
    """The system's `iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


class OtherMemory:
    """The system call that reads memory of another process.

    Raises
    ------
    OSError : this system lacks the call.
    """

    def __init__(self) -> None:
        found = ctypes.CDLL(None, use_errno=True)
        if not hasattr(found, "process_vm_readv"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        word, number, where = ctypes.c_ulong, ctypes.c_int, ctypes.c_void_p
        found.process_vm_readv.argtypes = (number, where, word, where, word, word)
        found.process_vm_readv.restype = ctypes.c_ssize_t
        self._read = found.process_vm_readv

    def read(self, process: int, stretches: Sequence[Stretch]) -> None:
        """Copy stretches of another process's memory into this process, in as few calls as possible.

        Raises
        ------
        OSError : the process is gone, the addresses are invalid, or reading is not permitted.
        """
        left = [stretch for stretch in stretches if stretch[2]]
        while left:  # one call copies 2 GiB at most, and may end within a stretch
            some = left[:_STRETCHES]
            array = _Vector * len(some)
            here = array(*(_Vector(to, size) for _, to, size in some))
            there = array(*(_Vector(address, size) for address, _, size in some))
            count = self._read(process, here, len(some), there, len(some), 0)
            if count <= 0:
                number = ctypes.get_errno() if count else errno.EFAULT
                raise OSError(number, os.strerror(number))
            left = _after(left, count)


def _after(stretches: Sequence[Stretch], count: int) -> list[Stretch]:
    """Return the rest of stretches after their first `count` bytes."""
    for i, (address, to, size) in enumerate(stretches):
        if count < size:
            return [(address + count, to + count, size - count), *stretches[i + 1 :]]
        count -= size
    return []
