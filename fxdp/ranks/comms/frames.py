"""The frames of the control channel: a kind, a length, the subject rank, and the content.

    DATA         sender's part of this round
    REFUSED      sender cannot take part in this round: text (the next round works)
    FAILED       a rank (the sender, or one that stopped the sender) raised: text   then end of stream
    KILLED       sender stops because that rank was killed                          then end of stream
    ENDED        sender's process ends without an error                             then end of stream
                 (about another rank, only in a tree: that rank has left, the sender stays)
    OUT_OF_STEP  that rank is at a different position of its program: text          then end of stream
    PING         test whether the receiver's process still runs
    WAITS        sender waits for this round: round number, and sender's position
    MISSING      ranks that the sender misses in this round, beyond the receiver (only in a tree)
    ASKS         request for the receiver's position, as a wait has timed out (passed on in a tree)
    PLACE        position of a rank, read by `liveness/stragglers.py` (passed on in a tree)
    (nothing)    sender was killed                                                  end of stream

Lengths and kinds are checked before a frame is stored.
"""

from __future__ import annotations

import enum
import socket
import struct

from fxdp.ranks.liveness.departure import TEXT_BYTES, DepartureKind

DATA_BYTES = 1 << 26  # of one rank's part of a round: texts of a large model take a hundredth
ROUND = struct.Struct("<q")  # the beginning of a WAITS
PLACE_BYTES = 49  # the beginning of a PLACE
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
"""The flag of `send` against signals of an ended connection; macOS has none, and Python ignores them."""

_HEADER = struct.Struct("<BIi")


class FrameKind(enum.IntEnum):
    """The kind of a frame."""

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
    """Raised for received bytes that are no frame of this version of fxdp."""


def framed(kind: int, content: bytes, about: int) -> bytes:
    """Return the bytes of a frame."""
    return _HEADER.pack(kind, len(content), about) + content


def take_frame(unread: bytearray) -> tuple[FrameKind, int, bytes] | None:
    """Remove the first frame and return kind, subject rank and content; None while the frame is incomplete.

    Raises
    ------
    NoFrameError : the bytes are no frame.
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
