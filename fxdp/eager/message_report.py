"""Messages of global tensors by the user's line: what an eager run sent, and why."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fxdp.ir.axis_rows import AxisRow, balance_lines
from fxdp.ranks.comms.sequence_log import user_frame

_LINES, _AXES = 4096, 64


@dataclass(frozen=True, slots=True)
class MessageRow:
    """The messages of one kind for one op at one line.

    Attributes
    ----------
    line : file and line of the user's code; a backward's messages stand at the line that began it.
    op : the op whose operand or result was sent.
    kind : the collective: `all_reduce`, `all_gather`, ...
    calls, bytes : the number of messages, and the bytes of this rank's values in all of them.
    full : how many of these calls ran the op on full values on every rank, because no part would be exact.
    """

    line: str
    op: str
    kind: str
    calls: int
    bytes: int
    full: int

    def __str__(self) -> str:
        rest = f", {self.full} run in full" if self.full else ""
        return f"{self.line}: {self.op}: {self.calls} x {self.kind}, {self.bytes:,} bytes{rest}"


_Key: TypeAlias = "tuple[str, str, str]"


class _MessageCounts:
    """Counts of messages by line, op and kind; at most 4096 of them, the oldest go first."""

    def __init__(self) -> None:
        self._counts: dict[_Key, list[int]] = {}
        self._axes: dict[str, AxisRow] = {}

    def add(self, op: str, kind: str, size: int) -> None:
        """Count one message of `size` bytes at the user's current line."""
        found = self._at(op, kind)
        found[0] += 1
        found[1] += size

    def add_full(self, op: str, kind: str) -> None:
        """Count one op that ran on full values."""
        self._at(op, kind)[2] += 1

    def add_batch(self, sizes: Mapping[str, Sequence[int]]) -> None:
        """Count the rows of each rank along the axes of a batch that has entered."""
        for name, of_ranks in sizes.items():
            known = self._axes.get(name)
            if known is None and len(self._axes) >= _AXES:
                continue
            self._axes[name] = AxisRow.of(name, of_ranks) if known is None else known.after(of_ranks)

    @property
    def axes(self) -> tuple[AxisRow, ...]:
        """The rows of each rank along each axis, of all batches."""
        return tuple(self._axes.values())

    def rows(self) -> tuple[MessageRow, ...]:
        """Return the rows, those with the most bytes first."""
        found = (MessageRow(*key, *counts) for key, counts in self._counts.items())
        return tuple(sorted(found, key=lambda row: (-row.bytes, -row.calls, row.line)))

    def clear(self) -> None:
        """Begin anew."""
        self._counts.clear()
        self._axes.clear()

    def _at(self, op: str, kind: str) -> list[int]:
        key = user_line(), op, kind
        found = self._counts.get(key)
        if found is None:
            if len(self._counts) >= _LINES:
                del self._counts[next(iter(self._counts))]
            found = self._counts[key] = [0, 0, 0]
        return found


def user_line() -> str:
    """Return the innermost line outside fxdp and torch, as `train.py:31`."""
    frame = user_frame(sys._getframe(1))
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


COUNTS = _MessageCounts()
"""The counts of this process, which `eager_report` shows."""


class EagerReport:
    """The messages of global tensors so far, by line; `print` shows a line for each row.

    Attributes
    ----------
    rows : the messages.
    plans, families : the plans in memory, one for each kind of call, and those that serve all batch sizes.
    bounds : the most plans and families that are kept.
    axes : the rows of each rank along each axis of the batches that have entered.
    """

    def __init__(
        self,
        rows: Iterable[MessageRow],
        plans: int,
        families: int,
        bounds: tuple[int, int],
        axes: Iterable[AxisRow] = (),
    ) -> None:
        self.rows, self.plans, self.families, self.bounds = tuple(rows), plans, families, bounds
        self.axes = tuple(axes)

    def __str__(self) -> str:
        head = f"{len(self.rows)} lines and ops with messages, {self.plans} kinds of calls planned"
        uneven = [row for row in self.axes if not row.is_even]
        return "\n".join([head, *map(str, self.rows), *balance_lines(uneven)])

    __repr__ = __str__
