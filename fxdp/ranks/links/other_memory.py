"""Memory of other processes of this host, read where it lies.

Linux copies it in one go ("cross memory attach"), without a buffer in between. It asks for the right to trace
the other process: the same user, and no rule against it (`kernel.yama.ptrace_scope`, a sandbox). Nobody
writes into another process, so none is harmed by an address that is none any more.
"""

from __future__ import annotations

import ctypes
import errno
import os


class _Stretch(ctypes.Structure):
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

    def read(self, process: int, address: int, size: int, to: int) -> None:
        """Copy so many bytes of another process to an address of this one.

        Raises
        ------
        OSError : it is gone, has no such memory, or may not be read.
        """
        done = 0
        while done < size:  # one call copies 2 GiB at most
            here, there = _Stretch(to + done, size - done), _Stretch(address + done, size - done)
            count = self._read(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if count <= 0:
                number = ctypes.get_errno() if count else errno.EFAULT
                raise OSError(number, os.strerror(number))
            done += count
