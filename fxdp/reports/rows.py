"""Rows of reports as plain values, from which tables, texts, pictures and JSON are made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fxdp.ir.graph.metadata import Location
from fxdp.reports.places import shown


def flat_dict(row: Any) -> dict[str, Any]:
    """Return a row as plain values, with the fields of `location` beside the row's own."""
    plain = asdict(row)
    location: dict[str, Any] = plain.pop("location")
    return plain | location


@dataclass(frozen=True, repr=False)
class CommRow:
    """One collective of a step, or several of the same kind."""

    op: str
    bytes: int
    """Size of the value that is reduced, gathered or sent, in global shape; the total of all `count`."""
    count: int
    cause: str
    location: str
    phase: str
    """`forward` or `backward`."""
    gradient: bool = False
    """True for a reduction of parameter gradients."""
    by: str = ""
    """The transport: `gloo`, `nccl`, `messages` that the calling thread itself writes and reads, `memory`
    that ranks of one host share, or `memory and gloo`: memory within hosts and gloo between hosts.
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
    """The stage's rank along `pp`."""
    begins: str
    """The module of the stage's first op."""
    share: float
    """Share of the estimated cost of all stages, forward and backward: 0 to 1."""
    parameters: int
    """Elements of the parameters that the stage owns; the first stage that reads a tied parameter owns it."""
    parameter_bytes: int
    sent: int
    """Bytes sent between pipeline ranks by this stage in a step, all micro-batches together."""


@dataclass(frozen=True, slots=True)
class CoverageRow:
    """A value of the batch that is communicated in full, or an op that every rank runs on the global batch.

    Attributes
    ----------
    what : `replicated`, `gathered`, `reduced entire`, `reduced and split` or `drawn once for all`; and
        `..., runs replicated` if every rank runs the op on the global batch.
    op : the op that runs replicated, or that needs the communicated value.
    cause, remedy : the reason, and advice for the user.
    bytes : size of the communicated value, per step; for a replicated op, size of the results on every rank.
    count : the number of such values or ops at this line.
    followers : the number of ops that run replicated as a consequence.
    location : the user's line with its module path.
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
        size = f"{self.phase}, {format_bytes(self.bytes)}{after}"
        head = f"{self.op} at {shown(self.location)}: {self.how} ({size})"
        return f"{head}\n    {self.cause}\n    to do: {self.remedy}"

    @property
    def how(self) -> str:
        """`what` with a count, as in `gathered 3 times`."""
        return f"{self.what} {self.count} times" if self.count > 1 else self.what

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain values for JSON."""
        return flat_dict(self)


@dataclass(frozen=True, slots=True)
class Explanation:
    """One node of the program of the global batch.

    `text` is the golden line of the node; `why` names the rule that placed the node, or the op that needs the
    collective.
    """

    name: str
    text: str
    why: str
    location: Location
    collective: bool = False
    placement: str = ""

    def __str__(self) -> str:
        return f"{self.text}\n    {self.why}\n    at {shown(self.location)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as plain values for JSON."""
        return flat_dict(self)

    def matches(self, words: Iterable[str]) -> bool:
        """Return whether each word occurs in the golden line, `model.py:12`, the module or the code."""
        at = self.location
        where = f"{self.text}\n{at.file}:{at.line} \n{at.code}\n{at.module}"
        return all(word in where for word in words)


def format_bytes(count: int) -> str:
    """Format bytes with the largest binary unit that leaves at least one unit, as in `1.5 KiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Format a duration as milliseconds below one second, as seconds above."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
