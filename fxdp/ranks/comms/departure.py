"""How a rank's part in a mesh ended, and text of other ranks made harmless for a terminal."""

from __future__ import annotations

import enum
import unicodedata
from dataclasses import dataclass

from fxdp.errors import RankFailedError

TEXT_LIMIT = 6000  # characters of an error that other ranks are told
TEXT_BYTES = 1 << 16  # of any text between ranks: more is cut off, and refused where it comes


class LateError(RankFailedError):
    """A rank did not come in time, though it is alive: it is named, and no news of it need be waited for."""


class DepartureKind(enum.IntEnum):
    """How a rank's part in the mesh ended."""

    FAILED = 2
    KILLED = 3
    ENDED = 4
    OUT_OF_STEP = 5


KILLED = "ended without an error message (killed? out of memory? machine lost?)"
UNHEARD = "does not answer any more: its machine, or the network to it, is lost"


@dataclass(frozen=True)
class Departure:
    """Why a rank no longer takes part: the rank at fault, how it ended, and its words."""

    rank: int
    kind: DepartureKind
    text: str = ""

    def words(self, name: int | str) -> str:
        """The ending of a rank that is called `name`."""
        if self.kind is DepartureKind.FAILED:
            return f"rank {name} failed: {self.text}"
        if self.kind is DepartureKind.OUT_OF_STEP:
            return f"rank {name} {self.text}"
        if self.kind is DepartureKind.ENDED:
            return (
                f"rank {name} ended its process while this rank still needed it; expected the same "
                "number of steps on all ranks (or see that rank's own output for an error outside fxdp)"
            )
        return f"rank {name} {self.text or KILLED}"

    def __str__(self) -> str:
        return self.words(self.rank)


def not_understood(rank: int, what: str) -> str:
    """The words for bytes of another rank that make no sense."""
    return f"rank {rank} {sent_nonsense(what)}"


def sent_nonsense(what: str) -> str:
    """The same without the rank."""
    return (
        f"sent what this rank does not understand ({harmless(what)}); expected the same release of "
        "fxdp on all ranks, and nobody else on their network (see SECURITY.md)"
    )


def as_text(content: bytes) -> str:
    """Text of another rank, harmless for a terminal."""
    return harmless(content[:TEXT_BYTES].decode(errors="replace"))


def as_bytes(text: str) -> bytes:
    """Text for another rank."""
    return text.encode(errors="replace")[:TEXT_BYTES]


def harmless(text: str) -> str:
    """Text of another rank without what a terminal would obey: colours, cursor, titles, reversed writing."""
    return "".join(char if _is_plain(char) else ascii(char)[1:-1] for char in text)


def _is_plain(char: str) -> bool:
    return char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
