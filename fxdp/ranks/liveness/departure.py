"""Reasons why ranks leave a mesh, and received text made safe for a terminal."""

from __future__ import annotations

import enum
import unicodedata
from dataclasses import dataclass

from fxdp.errors import RankFailedError

ALONE = (
    "what one rank does alone, as an evaluation under `if rank == 0:` or the steps of an episode, calls the "
    "model itself, under torch.no_grad(): compiled.module(x), or, if parameters are sharded, is made by all"
)
"""The remedy for a forward that not all ranks make."""
TEXT_LIMIT = 6000  # most characters of an error sent to all ranks
TEXT_BYTES = 1 << 16  # of any text between ranks: more is cut off by the sender, and refused by the receiver


class LateError(RankFailedError):
    """Raised when a living rank is late. The message names this rank, so no further news is awaited."""


class DepartureKind(enum.IntEnum):
    """The way in which a rank left the mesh."""

    FAILED = 2
    KILLED = 3
    ENDED = 4
    OUT_OF_STEP = 5


_KILLED = "ended without an error message (killed? out of memory? machine lost?)"


@dataclass(frozen=True)
class Departure:
    """The reason why a rank no longer takes part: the rank at fault, the kind, and a message."""

    rank: int
    kind: DepartureKind
    text: str = ""

    def words(self, name: int | str) -> str:
        """Return the departure as text for a rank with this name."""
        if self.kind is DepartureKind.FAILED:
            return f"rank {name} failed: {self.text}"
        if self.kind is DepartureKind.OUT_OF_STEP:
            return f"rank {name} {self.text}"
        if self.kind is DepartureKind.ENDED:
            return (
                f"rank {name} ended its process while this rank still needed it; expected the same "
                "number of steps on all ranks (or see that rank's own output for an error outside fxdp). "
                f"A rank without samples passes a batch of none: x[:0]; {ALONE}"
            )
        return f"rank {name} {self.text or _KILLED}"

    def __str__(self) -> str:
        return self.words(self.rank)


def not_understood(rank: int, what: str) -> str:
    """Return the message for invalid bytes received from a rank."""
    return f"rank {rank} {sent_nonsense(what)}"


def sent_nonsense(what: str) -> str:
    """Return the message for invalid bytes, to be preceded by the rank."""
    return (
        f"sent what this rank does not understand ({harmless(what)}); expected the same release of "
        "fxdp on all ranks, and nobody else on their network (see SECURITY.md)"
    )


def as_text(content: bytes) -> str:
    """Return received text, made safe for a terminal."""
    return harmless(content[:TEXT_BYTES].decode(errors="replace"))


def as_bytes(text: str) -> bytes:
    """Return text as bytes for sending."""
    return text.encode(errors="replace")[:TEXT_BYTES]


def harmless(text: str) -> str:
    """Escape control characters in received text: colors, cursor, titles, reversed writing."""
    return "".join(char if _is_plain(char) else ascii(char)[1:-1] for char in text)


def _is_plain(char: str) -> bool:
    return char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
