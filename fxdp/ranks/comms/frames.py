"""The frames of the control channel: a kind, a length, the rank it is about, and the content.

    DATA      my part of this round
    REFUSED   I cannot take part in this round: text (the next round is fine)
    FAILED    a rank (I, or one that I follow) raised an error: text    then end of stream
    KILLED    I stop because that rank was killed                       then end of stream
    ENDED     my process ends, I raised nothing                         then end of stream
              (about another rank: it has left, I am here, by the tree only)
    ASTRAY    that rank is elsewhere in its program: text               then end of stream
    PING      are you there?
    WAITS     I wait for this round: its number, and where I am
    MISSING   I am in this round, and whom I miss there beyond you: its number, ranks (by the tree only)
    ASKS      my wait has run out: where are you? (passed on in a tree)
    PLACE     where a rank is: `comms/stragglers.py` reads it (passed on in a tree)
    (nothing) I was killed                                              end of stream

Lengths are bounded, and kinds known, before anything is kept for a frame.
"""

from __future__ import annotations

import enum
import struct

from fxdp.ranks.comms.departure import TEXT_BYTES, DepartureKind

DATA_BYTES = 1 << 26  # of one rank's part of a round: texts of a large model take a hundredth
ROUND = struct.Struct("<q")  # with which a WAITS begins
PLACE_BYTES = 49  # with which a PLACE begins
_HEADER = struct.Struct("<BIi")


class FrameKind(enum.IntEnum):
    """What a frame is."""

    DATA = 0
    REFUSED = 1
    FAILED = DepartureKind.FAILED
    KILLED = DepartureKind.KILLED
    ENDED = DepartureKind.ENDED
    OUT_OF_STEP = DepartureKind.OUT_OF_STEP
    WAITS = 6
    PING = 7
    MISSING = 8
    ASKS = 9
    PLACE = 10


_KINDS = {int(kind): kind for kind in FrameKind}
_LEAST = {FrameKind.WAITS: ROUND.size, FrameKind.MISSING: ROUND.size, FrameKind.PLACE: PLACE_BYTES}


class NoFrameError(Exception):
    """What came is no frame of this version of fxdp."""


def framed(kind: int, content: bytes, about: int) -> bytes:
    """The bytes of a frame."""
    return _HEADER.pack(kind, len(content), about) + content


def take_frame(unread: bytearray) -> tuple[FrameKind, int, bytes] | None:
    """Take the first frame off: its kind, the rank it is about, its content. None while it is not complete.

    Raises
    ------
    NoFrameError : it is none.
    """
    if len(unread) < _HEADER.size:
        return None
    number, length, about = _HEADER.unpack_from(unread)
    kind = _KINDS.get(number)
    if kind is None:
        raise NoFrameError(f"a frame of kind {number}")
    if length > (DATA_BYTES if kind is FrameKind.DATA else TEXT_BYTES) or length < _LEAST.get(kind, 0):
        raise NoFrameError(f"a frame of {length} bytes")
    end = _HEADER.size + length
    if len(unread) < end:
        return None
    content = bytes(unread[_HEADER.size : end])
    del unread[:end]
    return kind, about, content
