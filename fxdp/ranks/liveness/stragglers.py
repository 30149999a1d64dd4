"""Straggler detection: find the late ranks after a collective of torch has timed out without naming a rank.

    rank 0   its wait has timed out       ASKS
    rank 1   waits, too                                PLACE: waits, has begun 7 in a group, and position
    rank 2   stuck in the user's code                  PLACE: does not wait, has begun 6, position
    rank 3   stopped                                   nothing

A rank's watch answers within a second, regardless of the main thread; so a rank without an answer is late,
too. All answers go to all ranks, as most ranks ask at about the same time.
"""

from __future__ import annotations

import operator
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NamedTuple

from fxdp.ranks.comms.channel import Channel
from fxdp.ranks.comms.frames import PLACE_BYTES
from fxdp.ranks.comms.sequence_log import SequenceLog, user_frame
from fxdp.ranks.liveness.departure import as_bytes, as_text
from fxdp.ranks.liveness.interrupt import Caller, in_collective

_ANSWER_S = 1.5  # per neighbor, as watches look once a second
_LONGEST_S = 12.0
_FRESH_S = 6.0  # greatest age of an answer to an earlier question
_LOOK_S = 0.05
_NAMED = 16  # most ranks named in an error
_TEXT = 600  # most bytes of a position
_STATE = struct.Struct("<?6q")  # whether the rank waits, collectives begun in each group
assert _STATE.size == PLACE_BYTES
_COMMS = ("fxdp/ranks/comms/", "fxdp/transport/")
_AMONG = (*_COMMS, "fxdp/ranks/tree/")
_DEPTH = 4


class _Answer(NamedTuple):
    waits: bool
    begun: tuple[int, ...]
    where: str


class StragglerDetection:
    """Exchange of positions between the ranks of a mesh.

    Parameters
    ----------
    control : the channel for questions and answers.
    caller : the thread that calls compiled modules.
    sequence_log : the calls and backwards of this rank.
    begun : function for the number of collectives begun in each of the six groups that ranks may share.
    """

    def __init__(
        self,
        control: Channel,
        caller: Caller,
        sequence_log: SequenceLog,
        begun: Callable[[], tuple[int, ...]],
    ) -> None:
        self._control, self._caller, self._sequence_log, self._begun = control, caller, sequence_log, begun
        self._asks = False
        control.is_at = self._here

    def late(self, over: Callable[[], bool]) -> str | None:
        """Return a message on the late ranks and their positions; None if no rank is late, or once `over`.

        To be called by the thread whose wait has timed out.
        """
        self._asks = True
        try:
            found = self._answers(over)
        finally:
            self._asks = False
        return None if over() else self._words(found)

    def _answers(self, over: Callable[[], bool]) -> dict[int, _Answer]:
        control, begin = self._control, time.monotonic()
        found: dict[int, bytes] = {}
        control.ask()
        end = begin + min(_ANSWER_S * control.hops, _LONGEST_S)
        while time.monotonic() < end and not over():
            for peer in control.peers:
                control.drain(peer)
            places = list(control.places.items())
            found = {rank: said for rank, (at, said) in places if at > begin - _FRESH_S}
            if len(found) == control.size - 1:
                break
            time.sleep(_LOOK_S)
        return {rank: _read(said) for rank, said in found.items()}

    def _words(self, found: dict[int, _Answer]) -> str | None:
        others = [rank for rank in range(self._control.size) if rank != self._control.rank]
        silent = [rank for rank in others if rank not in found]
        # a waiting rank counts as late only if all ranks wait
        absent = [rank for rank, said in found.items() if not said.waits]
        begun = self._begun()
        behind = [rank for rank in absent if any(map(operator.lt, found[rank].begun, begun))]
        elsewhere = behind or absent
        lines = [f"rank {self._names(elsewhere)} did not come to a collective in time"] if elsewhere else []
        lines += [_silent(self._names(silent), len(silent))] if silent else []
        if not lines:
            found = found | {self._control.rank: _read(self._here())}
            elsewhere = _out_of_step(found)
            which = "different collectives" if len(elsewhere) == len(found) else "another one than the others"
            lines = [f"rank {self._names(elsewhere)} waits for a collective: {which}"] if elsewhere else []
        for rank in elsewhere[:_NAMED]:
            lines.append(f"  rank {self._control.names[rank]} is {found[rank].where}")
        return "\n".join(lines) if lines else None

    def _names(self, ranks: Sequence[int]) -> str:
        more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
        return ", ".join(str(self._control.names[rank]) for rank in ranks[:_NAMED]) + more

    def _here(self) -> bytes:
        """Return the position of this rank for all ranks; called by the watch."""
        frames, main = sys._current_frames(), threading.main_thread().ident or 0
        frame = frames.get(self._caller.thread) or frames.get(main)
        waits = self._asks or in_collective(frame) or _among_ranks(frame)
        when = "in" if self._caller.active else "after"
        where = f"{_place(frame)} ({when} {self._sequence_log.words(self._sequence_log.now)})"
        return _STATE.pack(waits, *self._begun()) + as_bytes(where)[:_TEXT]


def _read(said: bytes) -> _Answer:
    waits, *begun = _STATE.unpack_from(said)
    return _Answer(waits, tuple(begun), as_text(said[_STATE.size :]))


def _out_of_step(found: dict[int, _Answer]) -> list[int]:
    """Return, among ranks that all wait, the ones that have begun different collectives than most."""
    counts = Counter(said.begun for said in found.values())
    usual, most = counts.most_common(1)[0]
    if list(counts.values()).count(most) > 1:  # no majority: the right order is unknown
        return sorted(found) if len(counts) > 1 else []
    return sorted(rank for rank, said in found.items() if said.begun != usual)


def _silent(names: str, count: int) -> str:
    ends = "its process has" if count == 1 else "their processes have"
    return (
        f"rank {names} did not come to a collective in time and did not answer where it is, though {ends} "
        "not ended; expected processes that are neither stopped nor swapped out"
    )


def _among_ranks(frame: FrameType | None) -> bool:
    """Return whether a thread waits for another rank in fxdp's own code."""
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if any(room in frame.f_code.co_filename for room in _AMONG):
            return True
        frame = frame.f_back
    return False


def _place(frame: FrameType | None) -> str:
    """Return the current line of a thread, and the user's line that led there."""
    if frame is None:
        return "between two lines"
    # this thread itself may be the one that asks
    while frame.f_back is not None and any(room in frame.f_code.co_filename for room in _COMMS):
        frame = frame.f_back
    here, user = frame, user_frame(frame)
    words = f"at {here.f_code.co_filename}:{here.f_lineno} in {here.f_code.co_name}"
    return words if user is here else f"{words}, called at {user.f_code.co_filename}:{user.f_lineno}"
