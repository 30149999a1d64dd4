"""Compact encoding of the values that many ranks send in one round, without loss, in one frame.

    all equal                    (4096 ranks, "x")                 one value
    as many integers each        32  7  32  9    an equal column is one number; any other column is each
                                 32  7  31  9    rank's difference from the minimum, in 1 to 8 bytes
                                  =  =   .  =
    anything else                each different value once, and for each rank the index of its value

So 8,192 ranks that differ only in the sizes of their batches need 8 KiB.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, overload

import numpy as np

_HEADER = struct.Struct("<BII")  # form, number of ranks, bytes of each value or number of different values
_COLUMN = struct.Struct("<Bq")  # bytes per difference, the minimum
_SAME, _TABLE, _LIST = range(3)
_WORD = 8
_ROW_BYTES = 4096  # longer values are text, or rows not worth a table
_MASK = (1 << 64) - 1
_Columns = Sequence[Any]
"""For each column an integer, or an array with one integer per rank."""
_WIDTHS = ((0, 1), (1, 1 << 8), (2, 1 << 16), (4, 1 << 32), (8, 1 << 64))


class RankParts(Sequence[bytes]):
    """Every rank's bytes, in the order of ranks.

    Attributes
    ----------
    columns : for rows of equally many 64-bit integers: the integers of all ranks by position, or one integer
        if equal for all; else None.
    """

    def __init__(
        self, count: int, same: bytes | None, columns: _Columns | None = None, several: Sequence[bytes] = ()
    ) -> None:
        self._count = count
        self._same = same
        self._several = several
        if columns is None and same and len(same) % _WORD == 0 and len(same) <= _ROW_BYTES:
            columns = struct.unpack(f"<{len(same) // _WORD}q", same)
        self.columns = columns

    @classmethod
    def of(cls, data: bytes, count: int = 1) -> RankParts:
        """Return the parts of `count` ranks with equal data."""
        return cls(count, data)

    @classmethod
    def join(cls, parts: Sequence[RankParts]) -> RankParts:
        """Join the parts of several sets of ranks, in order."""
        counts = [len(part) for part in parts]
        first = parts[0]._same
        if first is not None and all(part._same == first for part in parts):
            return cls(sum(counts), first)
        tables = [part.columns for part in parts if part.columns is not None]
        if len(tables) == len(parts) and len(set(map(len, tables))) == 1:
            return cls(sum(counts), None, [_joined(each, counts) for each in zip(*tables, strict=True)])
        return cls(sum(counts), None, None, [data for part in parts for data in part])

    def ordered(self, places: Any) -> RankParts:
        """Return the parts in a new order: first the part at the first of these places."""
        if self._same is not None:
            return self
        if self.columns is not None:
            moved = [each if isinstance(each, int) else each[places] for each in self.columns]
            return RankParts(self._count, None, moved)
        return RankParts(self._count, None, None, [self._several[i] for i in places])

    def encode(self) -> bytes:
        """Encode the parts as bytes for transfer."""
        if self._same is not None:
            return _HEADER.pack(_SAME, self._count, len(self._same)) + self._same
        if self.columns is not None:
            header = _HEADER.pack(_TABLE, self._count, len(self.columns) * _WORD)
            return b"".join((header, *map(_written, self.columns)))
        numbers: dict[bytes, int] = {}
        chosen = [numbers.setdefault(data, len(numbers)) for data in self._several]
        lengths = np.array([len(data) for data in numbers], "<u4").tobytes()
        header = _HEADER.pack(_LIST, self._count, len(numbers))
        return b"".join((header, lengths, np.array(chosen, "<u4").tobytes(), *numbers))

    @classmethod
    def decode(cls, data: bytes, count: int) -> RankParts:
        """Decode the result of `encode`, for `count` ranks.

        Raises
        ------
        ValueError : the data is not a valid encoding.
        """
        if len(data) < _HEADER.size:
            raise ValueError("no header")
        form, there, size = _HEADER.unpack_from(data)
        if there != count:
            raise ValueError(f"values of {there} ranks instead of {count}")
        body = memoryview(data)[_HEADER.size :]
        if form == _SAME and size == len(body):
            return cls(count, bytes(body))
        if form == _TABLE:
            return cls(count, None, _read_columns(body, count, size))
        if form == _LIST:
            return cls(count, None, None, _read_list(body, count, size))
        raise ValueError(f"form {form} of {len(body)} bytes")

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        if self._same is not None:
            return self._same
        if self.columns is not None:
            row = [each if isinstance(each, int) else int(each[index]) for each in self.columns]
            return struct.pack(f"<{len(row)}q", *row)
        return self._several[index]

    def __iter__(self) -> Iterator[bytes]:
        if self._same is not None or self.columns is None:
            return iter(self._several) if self._same is None else repeat(self._same, self._count)
        rows = np.stack([np.broadcast_to(np.asarray(each, "<i8"), self._count) for each in self.columns], 1)
        return (row.tobytes() for row in rows)


def _joined(column: Sequence[Any], counts: Sequence[int]) -> Any:
    """Join one column of several sets of ranks."""
    first = column[0]
    if isinstance(first, int) and all(isinstance(each, int) and each == first for each in column):
        return first
    pairs = zip(column, counts, strict=True)
    return np.concatenate([np.full(n, each, "<i8") if isinstance(each, int) else each for each, n in pairs])


def _written(column: Any) -> bytes:
    if isinstance(column, int):
        return _COLUMN.pack(0, column)
    least, most = int(column.min()), int(column.max())
    width = next(width for width, room in _WIDTHS if most - least < room)
    # the difference of any two 64-bit integers fits an unsigned one
    above = (column.view("<u8") - np.uint64(least & _MASK)).astype(f"<u{width}") if width else b""
    return _COLUMN.pack(width, least) + bytes(above)


def _read_columns(body: memoryview, count: int, size: int) -> _Columns:
    if size % _WORD or not 0 < size <= _ROW_BYTES:  # before anything is allocated
        raise ValueError(f"rows of {size} bytes")
    found: list[Any] = []
    at = 0
    for _ in range(size // _WORD):
        if at + _COLUMN.size > len(body):
            raise ValueError("columns are missing")
        width, least = _COLUMN.unpack_from(body, at)
        at += _COLUMN.size
        if width not in dict(_WIDTHS) or at + width * count > len(body):
            raise ValueError(f"a column of {width} bytes per rank")
        if width:
            above = np.frombuffer(body, f"<u{width}", count, at).astype("<u8")
            found.append((above + np.uint64(least & _MASK)).view("<i8"))
            at += width * count
        else:
            found.append(least)
    if at != len(body):
        raise ValueError("more than the columns")
    return found


def _read_list(body: memoryview, count: int, different: int) -> list[bytes]:
    if different > count or 4 * (different + count) > len(body):
        raise ValueError(f"{different} values of {count} ranks")
    lengths = np.frombuffer(body, "<u4", different).astype(np.int64)
    chosen = np.frombuffer(body, "<u4", count, 4 * different)
    ends = 4 * (different + count) + np.cumsum(lengths)
    if not different or chosen.max() >= different or ends[-1] != len(body):
        raise ValueError("lengths that do not fit")
    values = [bytes(body[end - n : end]) for n, end in zip(lengths.tolist(), ends.tolist(), strict=True)]
    return [values[i] for i in chosen.tolist()]
