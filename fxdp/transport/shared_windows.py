"""Zero-copy all-gather: unsharded parameters as mappings of shards in shared memory.

Each rank holds its shards in memory that all ranks can open. An unsharded parameter is all ranks' shards,
one after another: an address range that maps the pages of all ranks in that order is the full value, without
a copy.

    memory of rank 0    | a0 a1 | b0 b1 |
    memory of rank 1    | a2 a3 | b2 b3 |
    window              | a0 a1 | a2 a3 | b0 b1 | b2 b3 |        the same pages, read-only here

A write into a shard is a write into all windows. So before a rank reads, all ranks report that their shards
are ready (`start`, `finish`), and before a rank may write again, all report that they have read (`settle`).
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
from fxdp.ir.network.adjoining import line_of
from fxdp.ranks.comms.messages import LinkBrokenError, Messages, Round
from fxdp.transport.shared_buffers import SharedBuffer, opened

_WHERE = struct.Struct("<QQQQ")  # process, descriptor, number of the memory, offset of the shards


class Window:
    """Addresses that map pages of several memories; a tensor over a mapping keeps the mapping alive."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size)  # only reserves addresses, all of which will map different memory
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.shown: dict[int, bytes] = {}
        """The location of the mapped shards, by rank."""

    def show(self, at: int, size: int, descriptor: int, start: int) -> None:
        """Map a part of a memory at an offset in the window; all numbers are multiples of the page size.

        Raises
        ------
        OSError : the system refuses, as this process has too many mappings.
        """
        kind = mmap.MAP_SHARED | _MAP_FIXED
        if _libc().mmap(self._address + at, size, mmap.PROT_READ, kind, descriptor, start) == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_MAP_FIXED, _FAILED = 0x10, ctypes.c_void_p(-1).value


def _libc() -> ctypes.CDLL:
    """Return the C library, as Python's own `mmap` accepts no address."""
    found = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_size_t, ctypes.c_int
    found.mmap.argtypes = (ctypes.c_void_p, word, number, number, number, ctypes.c_long)
    found.mmap.restype = ctypes.c_void_p
    return found


@dataclass(frozen=True)
class _Held:
    """Memory of this rank with parameter shards."""

    descriptor: int
    number: int
    size: int


@dataclass(eq=False)
class _Showing:
    """Shards that are about to be mapped as full values; `window` maps them once finished."""

    window: Window
    sizes: Sequence[int]
    """The bytes of a rank's shards, value by value."""
    where: bytes
    ready: Round


@dataclass(eq=False)
class SharedWindows:
    """The parameter shards of one rank, and the windows; for one thread at a time.

    All ranks start and finish the same values in the same order.

    Parameters
    ----------
    messages : the connections between the ranks.
    ranks : number of ranks.
    """

    messages: Messages
    ranks: int
    _held: dict[int, _Held] = field(default_factory=dict)
    """Memory by start address."""
    _made: int = 0
    _windows: dict[tuple[int, ...], Window] = field(default_factory=dict)
    _staged: list[SharedBuffer] = field(default_factory=list)
    """Copies of shards outside this memory, kept until all ranks have read them."""
    _read: bool = False

    def memory(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return `count` zeros for shards, beginning at a page.

        Raises
        ------
        StateError : there is not enough memory.
        """
        made = self._buffer(count * dtype.itemsize)
        address = made.data.data_ptr()
        self._held[address] = _Held(made.descriptor, made.number, made.data.nbytes)
        weakref.finalize(made.mapped, self._forget, address).atexit = False
        return made.data.view(dtype)

    def start(self, values: Sequence[Tensor]) -> tuple[Tensor, _Showing]:
        """Start the all-gather of several values, given this rank's shard of each; `finish` must follow.

        `values` are the flat padded shards, of one dtype, each of full pages. The returned tensor has the
        full values one after another, each followed by its padding, and is read-only.
        """
        sizes = [value.nbytes for value in values]
        held, at = self._place(values)
        key = (held.number, at, *sizes)
        window = self._windows.get(key)
        if window is None:
            window = Window(self.ranks * sum(sizes))
            if held.number in {kept.number for kept in self._held.values()}:
                self._windows[key] = window
        where = _WHERE.pack(os.getpid(), held.descriptor, held.number, at)
        self._read = True
        begun = _Showing(window, sizes, where, self.messages.start(memoryview(where)))
        return torch.frombuffer(window.memory, dtype=values[0].dtype), begun

    def finish(self, begun: _Showing) -> None:
        """Wait until all ranks' shards are ready, then map all shards.

        Raises
        ------
        LinkBrokenError : a connection ended, or a rank's memory cannot be opened.
        RankFailedError : a rank was late.
        StateError : this process has too many mappings.
        """
        found = {rank: bytes(part) for rank, part in self.messages.finish(begun.ready).items()}
        found[self.messages.rank] = begun.where
        for rank, where in found.items():
            if begun.window.shown.get(rank) != where:
                self._show(begun, rank, where)

    def settle(self) -> None:
        """Wait until all ranks have read the mapped shards: from here on shards may be written.

        Raises
        ------
        LinkBrokenError : a connection ended.
        RankFailedError : a rank was late.
        """
        if not self._read:
            return
        self._read = False
        self.messages.finish(self.messages.start(memoryview(b"read")))
        for one in self._staged:
            os.close(one.descriptor)
        self._staged.clear()

    def _place(self, values: Sequence[Tensor]) -> tuple[_Held, int]:
        """Return the memory in which the shards are contiguous, and the offset; a copy if they are not."""
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

    def _show(self, begun: _Showing, rank: int, where: bytes) -> None:
        process, descriptor, _, start = _WHERE.unpack(where)
        place = 0  # offset of the next full value
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
        """Forget freed shards, which cannot be opened any more, and drop all windows of these shards."""
        held = self._held.pop(address)
        for key in [key for key in self._windows if key[0] == held.number]:
            del self._windows[key]
        os.close(held.descriptor)

    def close(self) -> None:
        """Release all windows; shards keep their values."""
        self._windows.clear()
