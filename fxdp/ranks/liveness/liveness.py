"""`Liveness`: notice ranks of a mesh that end, fail, hang or are late, and stop this rank with the reason.

    watch thread    sleeps until a control connection closes, then reads that rank's reason;
                    if the rank failed or was killed: cuts the groups, so that the main thread's wait ends,
                    and raises the error in Python code; if the main thread stays in a collective even so,
                    prints the reason and ends the process

Once a second the thread also checks whether the process group still exists, and whether a rank has left out
a backward in which this rank waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

from fxdp.ranks.comms.channel import Channel
from fxdp.ranks.comms.sequence_log import SAME_ORDER, SequenceLog
from fxdp.ranks.comms.wires import Peer
from fxdp.ranks.liveness.departure import ALONE, Departure, DepartureKind
from fxdp.ranks.liveness.interrupt import Caller, in_collective
from fxdp.ranks.liveness.stragglers import StragglerDetection

_log = logging.getLogger("fxdp")
_LEAVE_S = 10.0  # how long data of a rank that ended in order may be in flight
_GRACE_S = 0.5  # for a collective to end by itself, with a better traceback
_STUCK_S = 20.0  # how long a thread may stay in a collective after a rank has failed
_OUTLAST_S = 3.0  # how long to wait at exit for the end of the rank at fault
_LOOK_S = 0.1
_CAUSE_S = 5.0  # how long to wait for the cause of a broken collective
_WHERE = struct.Struct("<qq")  # backwards begun so far, the waiting call


class Liveness:
    """The liveness of one mesh's ranks: a thread that watches them, and questions to late ones.

    Parameters
    ----------
    control : the watched connections.
    sequence_log : the calls and backwards that this rank has begun.
    alive : function that returns whether the process group still exists.
    cut : function that ends every wait in the groups, here and on all ranks.
    closed : function called when the watch has ended.
    begun : function for the number of collectives begun in each of the six groups that ranks may share.

    Attributes
    ----------
    caller : the thread that is inside a compiled call.
    departure : the reason why the connections can no longer be used, or None.
    """

    def __init__(
        self,
        control: Channel,
        sequence_log: SequenceLog,
        alive: Callable[[], bool],
        cut: Callable[[], None],
        closed: Callable[[], None],
        begun: Callable[[], tuple[int, ...]],
    ) -> None:
        self._control, self.caller, self._sequence_log = control, Caller(), sequence_log
        self._alive, self._cut, self._closed = alive, cut, closed
        self._rank = control.rank
        control.waits_for = self._where
        self._stragglers = StragglerDetection(control, self.caller, sequence_log, begun)
        self.departure: Departure | None = None
        self._left: dict[int, tuple[float, int]] = {}  # time, and position at the end
        self._fallen: float | None = None
        self._outlasts: float | None = None
        self._known = threading.Event()
        self._lock = threading.Lock()
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="fxdp-watch", daemon=True)
        self._thread.start()

    def stop(self, departure: Departure) -> None:
        """Close the connections: tell all ranks the reason, then cut the groups. The first reason counts."""
        with self._lock:
            self.departure = self.departure or departure
        self._control.broadcast_failure(self.departure)
        self._cut()
        self._known.set()

    def fail(self, text: str) -> None:
        """Close the connections because this rank has failed; an earlier reason counts."""
        self.stop(Departure(self._rank, DepartureKind.FAILED, text))

    def cause(self) -> Departure | None:
        """Return why a collective broke, after a short wait for news; None if no rank has failed or left."""
        end = time.monotonic() + _CAUSE_S
        while not self._known.wait(_LOOK_S) and time.monotonic() < end:
            left = list(self._left.values())
            if left and time.monotonic() - left[0][0] > _GRACE_S:  # no worse news has arrived
                break
        return self.departure or next(
            (Departure(rank, DepartureKind.ENDED) for rank in list(self._left)), None
        )

    def late(self) -> str | None:
        """Return a message on ranks late for a collective, with their positions; None if no rank is late."""
        return self._stragglers.late(lambda: self.departure is not None)

    def _where(self) -> bytes:
        """Return the content of WAITS, sent while this rank waits before a call."""
        return _WHERE.pack(self._sequence_log.backwards, self._sequence_log.now)

    def close(self) -> None:
        """Leave without an error and release all resources, and inform peers that still wait."""
        self._control.broadcast_failure(self._goodbye())
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _goodbye(self) -> Departure:
        """Return the departure of a rank without an error, with the number of moments in the sequence log."""
        return Departure(self._rank, DepartureKind.ENDED, str(self._sequence_log.began))

    def outlast(self) -> None:
        """Wait a little for the end of another rank that has failed.

        torchrun calls the process that ended first the root cause.
        """
        departure = self.departure
        if departure is not None and departure.kind is DepartureKind.FAILED and departure.rank != self._rank:
            self._outlasts = self._outlasts or time.monotonic() + _OUTLAST_S  # once, at exit and in the watch
            self._control.outlast(departure.rank, self._outlasts)

    def _run(self) -> None:
        peers = {peer.connection.fileno(): peer for peer in self._control.peers}
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for descriptor in peers:
            poll.register(descriptor, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
        woken = False
        while self._alive() and not woken:
            hurries = self.caller.active and self._fallen is not None
            for descriptor, _ in poll.poll(100 if hurries else 1000):
                woken = woken or descriptor == self._wake.fileno()
                if descriptor in peers:
                    poll.unregister(descriptor)
                    self._on_hang_up(peers[descriptor])
            self._control.drain_all()  # a rank may have asked for this one's position
            self._check_left()
            self._check_left_out()
            self._check_stuck()
        self._control.broadcast_failure(self._goodbye())
        self.outlast()
        if woken:  # the process ends: until then all ranks can see that it has not
            self._control.leave_open()
        else:
            self._control.close()
        self._closed()
        self._wake.close()
        self._waker.close()

    def _on_hang_up(self, peer: Peer) -> None:
        departure = self._control.drain(peer) or Departure(peer.rank, DepartureKind.KILLED)
        _log.debug("rank %d: connection to rank %d ended: %s", self._rank, peer.rank, departure.kind.name)
        if departure.kind is DepartureKind.ENDED:
            self._leave(departure)
            return
        self._fall(departure)

    def _leave(self, departure: Departure) -> None:
        began = (
            int(departure.text) if departure.text.isdecimal() and len(departure.text) < 20 else sys.maxsize
        )
        self._left.setdefault(departure.rank, (time.monotonic(), began))

    def _check_left(self) -> None:
        """Handle ranks that ended without an error while this rank is inside a call.

        A call that the ended rank has not begun will never end. In a call that the rank has begun, data may
        still be in flight, or may not be needed.
        """
        if self._control.left is not None:
            self._leave(self._control.left)
        now = time.monotonic()
        for rank, (since, began) in self._left.items():
            if not self.caller.active:
                self._left[rank] = now, began
            elif self.departure is None and (
                began < self._sequence_log.began
                or (now - since > _LEAVE_S and in_collective(self.caller.frame()))
            ):
                self._fall(Departure(rank, DepartureKind.ENDED))

    def _check_left_out(self) -> None:
        """Stop if a rank waits before its next call, but has left out the backward that this rank is in.

        This rank would wait in the sums of that backward for a rank that waits for this one.
        """
        if not self.caller.active or self.departure is not None:
            return
        for peer in self._control.peers:
            if peer.waits is None or peer.waits[0] <= self._control.round:
                continue
            backwards, call = _WHERE.unpack(peer.waits[1])
            now, names = self._sequence_log.now, self._control.names
            if self._sequence_log.backwards > backwards and self._control.round < peer.waits[0]:
                rank, here = names[peer.rank], names[self._rank]
                text = (
                    f"left out {self._sequence_log.words(now)}, in which rank {here} waits for it: rank "
                    f"{rank} is "
                    f"in {self._sequence_log.words(call)} already; {SAME_ORDER}; {ALONE}"
                )
                self._fall(Departure(peer.rank, DepartureKind.OUT_OF_STEP, text))
                return

    def _fall(self, departure: Departure) -> None:
        with self._lock:
            self.departure = self.departure or departure
        self._fallen = self._fallen or time.monotonic()
        self._known.set()
        self._cut()

    def _check_stuck(self) -> None:
        """Interrupt a call of this rank that continues after another rank has failed.

        A collective ends with the cut of the group, Python code with the error raised inside. The last
        resort, for a collective that does not end even so (gloo can lose a wake-up), is to end the process.
        """
        if not self.caller.active or self._fallen is None or self.departure is None:
            return
        since = time.monotonic() - self._fallen
        if since > _GRACE_S:
            self.caller.interrupt()
        if since > _STUCK_S and in_collective(self.caller.frame()):
            sys.stderr.write(
                f"fxdp.errors.RankFailedError: {self._control.words(self.departure)}\n"
                f"rank {self._control.names[self._rank]} was still waiting in a collective {_STUCK_S:g} s "
                "later and ends here\n"
            )
            sys.stderr.flush()
            os._exit(1)
