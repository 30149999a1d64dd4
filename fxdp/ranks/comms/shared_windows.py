"""Parameter shards in memory that all ranks of a host map, and unsharded parameters made of these shards.

Each rank holds its rows in memory that the others can open. An unsharded parameter is all ranks' rows, one
after
another: a stretch of addresses that maps the pages of all ranks in that order is the full value, uncopied.

    memory of rank 0    | a0 a1 | b0 b1 |
    memory of rank 1    | a2 a3 | b2 b3 |
    window              | a0 a1 | a2 a3 | b0 b1 | b2 b3 |        the same pages, which can only be read here

Whoever writes into his rows writes into all windows. So before anybody reads, all say that their rows are
there (`start`, `finish`), and before anybody may write again, all say that they have read (`settle`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxdp.errors import StateError
from fxdp.ir.adjoining import line_of
from fxdp.ranks.comms.messages import LinkBrokenError, Messages, Round
from fxdp.ranks.comms.shared_buffers import SharedBuffer, opened

_WHERE = struct.Struct("<QQQQ")  # process, descriptor, number of the memory, where in it the rows begin


class Window:
    """Addresses that show pages of several memories; what it shows lives as long as a tensor over it."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size)  # only to have the addresses: all of it will show something else
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.shown: dict[int, bytes] = {}
        """Where the rows of each rank lie that it shows."""

    def show(self, at: int, size: int, descriptor: int, start: int) -> None:
        """Show a part of a memory from a byte of the window on; all numbers are full pages.

        Raises
        ------
        OSError : the system cannot, as this process shows too many already.
        """
        kind = mmap.MAP_SHARED | _MAP_FIXED
        if _libc().mmap(self._address + at, size, mmap.PROT_READ, kind, descriptor, start) == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_MAP_FIXED, _FAILED = 0x10, ctypes.c_void_p(-1).value


def _libc() -> ctypes.CDLL:
    """The C library, as Python's own `mmap` takes no address."""
    found = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_size_t, ctypes.c_int
    found.mmap.argtypes = (ctypes.c_void_p, word, number, number, number, ctypes.c_long)
    found.mmap.restype = ctypes.c_void_p
    return found


@dataclass(frozen=True)
class _Held:
    """Memory of this rank with rows in it."""

    descriptor: int
    number: int
    size: int


@dataclass(eq=False)
class Showing:
    """Rows that are about to be seen as full values; `window` has them once it is finished."""

    window: Window
    sizes: Sequence[int]
    """The bytes of a rank's rows, value by value."""
    where: bytes
    ready: Round


@dataclass(eq=False)
class SharedWindows:
    """The rows of one rank, and its windows; for one thread at a time.

    All ranks start and finish the same values in the same order.

    Parameters
    ----------
    messages : the connections between the ranks.
    ranks : how many there are.
    """

    messages: Messages
    ranks: int
    _held: dict[int, _Held] = field(default_factory=dict)
    """By the address at which it begins."""
    _made: int = 0
    _windows: dict[tuple[int, ...], Window] = field(default_factory=dict)
    _staged: list[SharedBuffer] = field(default_factory=list)
    """Copies of rows that lie elsewhere, until all have seen them."""
    _read: bool = False

    def memory(self, count: int, dtype: torch.dtype) -> Tensor:
        """Zeros for rows: so many elements, which begin with a page.

        Raises
        ------
        StateError : no room.
        """
        made = self._buffer(count * dtype.itemsize)
        address = made.data.data_ptr()
        self._held[address] = _Held(made.descriptor, made.number, made.data.nbytes)
        weakref.finalize(made.mapped, self._forget, address).atexit = False
        return made.data.view(dtype)

    def start(self, values: Sequence[Tensor]) -> tuple[Tensor, Showing]:
        """The entire of several values, each of which this rank has its rows of; `finish` must follow.

        `values` are the flat rows, padded, of one dtype, each of full pages. What is given has their full
        values one after another, each with its padding at its end, and can only be read.
        """
        sizes = [value.nbytes for value in values]
        held, at = self._place(values)
        window = self._windows.get((held.number, at, *sizes))
        if window is None:
            window = Window(self.ranks * sum(sizes))
            if held.number in {kept.number for kept in self._held.values()}:
                self._windows[held.number, at, *sizes] = window
        where = _WHERE.pack(os.getpid(), held.descriptor, held.number, at)
        self._read = True
        begun = Showing(window, sizes, where, self.messages.start(memoryview(where)))
        return torch.frombuffer(window.memory, dtype=values[0].dtype), begun

    def finish(self, begun: Showing) -> None:
        """Wait until all ranks' rows are there, and show them.

        Raises
        ------
        LinkBrokenError : a connection ended, or a rank's memory cannot be opened.
        RankFailedError : a rank did not come in time.
        StateError : this process shows too many pages already.
        """
        found = {rank: bytes(part) for rank, part in self.messages.finish(begun.ready).items()}
        found[self.messages.rank] = begun.where
        for rank, where in found.items():
            if begun.window.shown.get(rank) != where:
                self._show(begun, rank, where)

    def settle(self) -> None:
        """Wait until all ranks have read what was shown: from here on rows may be written.

        Raises
        ------
        LinkBrokenError : a connection ended.
        RankFailedError : a rank did not come in time.
        """
        if not self._read:
            return
        self._read = False
        self.messages.finish(self.messages.start(memoryview(b"read")))
        for one in self._staged:
            os.close(one.descriptor)
        self._staged.clear()

    def _place(self, values: Sequence[Tensor]) -> tuple[_Held, int]:
        """The memory in which rows lie one after another, and where; a copy's if they lie elsewhere."""
        line = line_of(values, [value.numel() for value in values])
        held = None if line is None else self._held.get(line.untyped_storage().data_ptr())
        at = 0 if line is None else int(line.storage_offset()) * line.itemsize
        if held is not None and at % mmap.PAGESIZE == 0:
            return held, at
        made = self._buffer(sum(value.nbytes for value in values))
        torch.cat([value.reshape(-1) for value in values], out=made.data.view(values[0].dtype))
        self._staged.append(made)
        return _Held(made.descriptor, made.number, made.data.nbytes), 0

    def _buffer(self, size: int) -> SharedBuffer:
        self._made += 1
        return SharedBuffer.make(size, self._made, "fxdp-rows")

    def _show(self, begun: Showing, rank: int, where: bytes) -> None:
        process, descriptor, _, start = _WHERE.unpack(where)
        place = 0  # of the next value's entire
        try:
            with opened(process, descriptor) as memory:
                for size in begun.sizes:
                    begun.window.show(place + rank * size, size, memory, start)
                    place, start = place + self.ranks * size, start + size
        except PermissionError as error:
            raise LinkBrokenError(f"the rows of rank {rank} cannot be opened: {error}") from error
        except OSError as error:
            raise StateError(
                f"the rows of rank {rank} cannot be shown in this process ({error.strerror}); expected room "
                "for a mapping per parameter and rank: raise vm.max_map_count, or set FXDP_SHARED_MEMORY=0"
            ) from error
        begun.window.shown[rank] = where

    def _forget(self, address: int) -> None:
        """Rows are gone: nobody can open them from here on, and windows of them are of no use."""
        held = self._held.pop(address)
        for key in [key for key in self._windows if key[0] == held.number]:
            del self._windows[key]
        os.close(held.descriptor)

    def close(self) -> None:
        """Let go of all windows; rows stay what they are."""
        self._windows.clear()
