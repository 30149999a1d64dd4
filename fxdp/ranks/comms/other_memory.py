"""Memory of other processes of this host, read where it lies.

Linux copies it in one go ("cross memory attach"), without a buffer in between. It asks for the right to trace
the other process: the same user, and no rule against it (`kernel.yama.ptrace_scope`, a sandbox). Nobody
writes into another process, so none is harmed by an address that is none any more.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from typing import TypeAlias

Stretch: TypeAlias = "tuple[int, int, int]"
"""Where something lies in another process, where it is to lie in this one, and its bytes."""
_STRETCHES = 1024
"""In one call, as the system allows."""


class _Vector(ctypes.Structure):
    """The system's `iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


class OtherMemory:
    """The system's call for it.

    Raises
    ------
    OSError : the system has none.
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
        """Copy stretches of another process' memory into this one's, by as few calls as can be.

        Raises
        ------
        OSError : it is gone, has no such memory, or may not be read.
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
    """What is left of stretches behind their first `count` bytes."""
    for i, (address, to, size) in enumerate(stretches):
        if count < size:
            return [(address + count, to + count, size - count), *stretches[i + 1 :]]
        count -= size
    return []
