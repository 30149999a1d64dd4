"""Plain tensors count as equal on all ranks: their first uses are compared, in messages that are sent anyway.

    noise (plain) --op--> noted: line, op, checksum      four calls in a row, then four after 4, 8, 16, ...
    next message  --> one number more for all notes      equal: the notes are dropped; else they are compared

So an unequal tensor is told before a loss that it has changed is read, and nothing waits for the check.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxdp.eager.message_report import user_line
from fxdp.ir.network.checksums import checksums, mixed
from fxdp.ir.network.raw_bytes import as_bytes, number_of, plain

_KEPT = 4096
_SMALL = 1 << 16  # bytes that are hashed; of more, blocks are summed
_IN_A_ROW = 4

OVERWRITING = frozenset(
    f"aten::{name}"
    for name in (
        "copy", "fill", "index_copy", "index_fill", "index_put", "masked_fill", "masked_scatter", "put",
        "scatter", "select_scatter", "slice_scatter",
    )
)  # fmt: skip
"""Ops that may overwrite all of their first operand, whose values ranks need not share: `torch.empty`."""


class Comparisons:
    """When one kind of use is compared: four times in a row, then four after 4, 8, 16, ... others each."""

    __slots__ = ("_compared", "_left")

    def __init__(self) -> None:
        self._compared = self._left = 0

    def due(self) -> bool:
        """Count one use, and return whether it is compared."""
        self._left -= 1
        if self._left >= 0:
            return False
        self._compared += 1
        self._left = 0 if self._compared % _IN_A_ROW else 2 << self._compared // _IN_A_ROW
        return True


class PlainValues:
    """What this rank has noted on plain tensors since the last message.

    Attributes
    ----------
    alike : whether all ranks compute bitwise equal results; if not, floating-point numbers are not compared.
    """

    def __init__(self, alike: bool) -> None:
        self.alike = alike
        self._notes: list[tuple[str, int]] = []

    def note(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Note the values of plain tensors that `what` has at the user's line."""
        line = user_line()
        for tensor in tensors:
            if self.alike or not (tensor.is_floating_point() or tensor.is_complex()):
                text = f"{line}: {what} has a plain tensor of shape {tuple(tensor.shape)}"
                self._notes.append((text, _digest(tensor)))
        del self._notes[_KEPT:]

    @property
    def digest(self) -> int:
        """One number for all notes."""
        return mixed([number for _, number in self._notes])

    def taken(self) -> list[tuple[str, int]]:
        """Return the notes, and begin anew."""
        found, self._notes = self._notes, []
        return found


def unequal(notes: Sequence[Sequence[tuple[str, int]]]) -> tuple[str, list[int]] | None:
    """Return the first use whose values differ from the first rank's, and the ranks that differ, by place.

    A use that only some ranks have noted, as what rank 0 alone computes for its log, is not compared.
    """
    by_use = [_by_use(of_rank) for of_rank in notes]
    for use, value in by_use[0].items():
        differing = [place for place, found in enumerate(by_use) if found.get(use, value) != value]
        if differing:
            return use[0], differing
    return None


def _by_use(notes: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
    found: dict[tuple[str, int], int] = {}
    counts: dict[str, int] = {}
    for text, value in notes:
        counts[text] = number = counts.get(text, 0) + 1
        found[text, number] = value
    return found


def _digest(tensor: Tensor) -> int:
    if tensor.is_meta:
        return 0
    value = plain(tensor.detach())
    if value.nbytes > _SMALL:
        return mixed(checksums([value]))
    return number_of(as_bytes(value).cpu().numpy().tobytes())
