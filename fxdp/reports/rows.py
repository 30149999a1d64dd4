"""What reports say, a row each, as plain values: tables, texts, pictures and JSON are made of these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fxdp.ir.metadata import Location


def flat_dict(row: Any) -> dict[str, Any]:
    """A row as plain values, those of its `location` among them."""
    plain = asdict(row)
    location: dict[str, Any] = plain.pop("location")
    return plain | location


@dataclass(frozen=True, repr=False)
class CommRow:
    """One collective of a step, or several of the same kind."""

    op: str
    bytes: int
    """Size of the value that is reduced, gathered or sent, in global shape, all `count` together."""
    count: int
    cause: str
    location: str
    phase: str
    """`forward` or `backward`."""
    gradient: bool = False
    """Whether it reduces gradients of parameters."""
    by: str = ""
    """What carries it: `gloo`, `nccl`, `messages` that the calling thread itself writes and reads,
    `memory` that the ranks of one host share, or `memory and gloo`: within hosts and between them.
    """

    def __repr__(self) -> str:
        times = f"{self.count} times " if self.count > 1 else ""
        by = f" by {self.by}" if self.by else ""
        return f"CommRow({self.phase} {self.op} {times}of {format_bytes(self.bytes)}{by}: {self.cause})"


@dataclass(frozen=True)
class StageRow:
    """One stage of a program in stages."""

    stage: int
    rank: int
    """Its rank along `pp`."""
    begins: str
    """The module of its first op."""
    share: float
    """Of the estimated cost of all stages, forward and backward: 0 to 1."""
    parameters: int
    """Elements of the parameters that it owns; a tied one belongs to the first stage that reads it."""
    parameter_bytes: int
    sent: int
    """Bytes that it sends to other pipeline ranks in a step, all micro-batches together."""


@dataclass(frozen=True, slots=True)
class CoverageRow:
    """A value of the batch that travels in full, or an op that every rank runs on the global batch.

    Attributes
    ----------
    what : `replicated`, `gathered`, `reduced entire`, `reduced and split` or `drawn once for all`; and
        `..., runs replicated` where every rank runs the op on the global batch.
    op : the op that runs replicated, or that needs the value that travels.
    cause, remedy : why, and what to do about it.
    bytes : of the value that travels, per step; of a replicated op, those of its results on every rank.
    count : how many such values or ops there are at this line; `followers`: ops that run replicated after it.
    site : the user's line with its module path.
    phase : `forward` or `backward`.
    """

    what: str
    op: str
    cause: str
    remedy: str
    bytes: int
    location: Location
    phase: str
    count: int = 1
    followers: int = 0

    def __str__(self) -> str:
        after = f", and {self.followers} more after it" if self.followers else ""
        head = f"{self.op} at {self.location}: {self.how} ({self.phase}, {format_bytes(self.bytes)}{after})"
        return f"{head}\n    {self.cause}\n    to do: {self.remedy}"

    @property
    def how(self) -> str:
        """`gathered 3 times`."""
        return f"{self.what} {self.count} times" if self.count > 1 else self.what

    def as_dict(self) -> dict[str, Any]:
        """The row as plain values that JSON can hold."""
        return flat_dict(self)


@dataclass(frozen=True, slots=True)
class Explanation:
    """One node of the program of the global batch.

    `text` is its golden line; `why` says which rule placed it, or which op needs the collective.
    """

    name: str
    text: str
    why: str
    location: Location
    collective: bool = False
    placement: str = ""

    def __str__(self) -> str:
        return f"{self.text}\n    {self.why}\n    at {self.location}"

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain values that JSON can hold."""
        return flat_dict(self)

    def matches(self, words: Iterable[str]) -> bool:
        """Whether every word is a part of the line, its place (`model.py:12`), its module or source code."""
        at = self.location
        where = f"{self.text}\n{at.file}:{at.line} \n{at.code}\n{at.module}"
        return all(word in where for word in words)


def format_bytes(count: int) -> str:
    """Bytes with the largest binary unit that keeps a integers before the point."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """A duration in the unit that reads best."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
