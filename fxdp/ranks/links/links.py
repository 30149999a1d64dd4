"""All that joins the ranks of one mesh, and a watch over the other ranks.

    main thread     collectives on `group` and `reduce_group`, small ones on `messages`, rounds on `control`
    watch thread    sleeps until a control connection closes, then reads that rank's last words;
                    if it failed or was killed: cuts both groups, so that the main thread's wait ends,
                    and raises the error in Python code; should the main thread stay in a collective all the
                    same, it says why and ends the process

A rank that fails says so on the control channel first and cuts its groups after, so every other rank knows
the cause when its own wait breaks. The watch wakes once a second to see whether the process group still
exists; links live as long as that, so `find_links` can hand the same ones to every compiled module.
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
import weakref

import torch.distributed as dist

from fxdp.errors import AgreementError, RankFailedError
from fxdp.ir.link_cost import LinkCost
from fxdp.ranks.links.control import Control, Peer
from fxdp.ranks.links.ending import Ending, EndKind
from fxdp.ranks.links.group import MessageGroup
from fxdp.ranks.links.history import SAME_ORDER
from fxdp.ranks.links.interrupt import Caller, in_collective
from fxdp.ranks.links.messages import LinkBrokenError, Messages, OutOfOrderError
from fxdp.ranks.links.shared_memory import SharedMemory
from fxdp.ranks.links.sockets import OpenSocket, cut
from fxdp.torch_compat import register_group

_log = logging.getLogger("fxdp")
_LEAVE_S = 10.0  # how long data of a rank that ended may still be under way
_GRACE_S = 0.5  # for a collective to end by itself, which has the better traceback
_STUCK_S = 20.0  # how long a thread may stay in a collective after another rank has failed
_OUTLAST_S = 3.0  # how long to wait at exit for the end of the rank at fault
_CAUSE_S = 5.0  # how long to wait for the cause of a broken collective
_WHERE = struct.Struct("<qq")  # backwards begun so far, the call that waits


class Links:
    """Process groups and control channel of one mesh on one rank; made by `opening.open_links`.

    Attributes
    ----------
    key : the global ranks joined, those of this rank's row, and the backend.
    name : what the names of the row's groups begin with.
    control : short messages between all ranks.
    messages : small tensors between the ranks of the row; programs reach it by `message_group_name`.
    memory : large sums between them, by the same name; None where the ranks do not share memory.
    cost : of sums over the network between them; None where they need none, or NCCL has it.
    caller : the thread that is inside a compiled call.
    turn : held by it.
    history : the calls and backwards that this rank has begun.
    """

    def __init__(
        self,
        world: dist.ProcessGroup,
        key: tuple[tuple[int, ...], tuple[int, ...], str],
        name: str,
        groups: dict[str, dist.ProcessGroup],
        control: Control,
        messages: Messages,
        memory: SharedMemory | None,
        sockets: set[OpenSocket],
        cost: LinkCost | None = None,
    ) -> None:
        self._world = weakref.ref(world)  # torch alone owns groups: destroying them frees them at once
        self.key = key
        self.name = name
        self._groups = {purpose: weakref.ref(group) for purpose, group in groups.items()}
        self.control = control
        self.messages = messages
        self.message_group_name = f"{name}/messages"
        self.memory = memory
        self.cost = cost
        self._message_group = MessageGroup(messages, len(key[1]), self._explain, memory)
        register_group(self.message_group_name, self._message_group)
        self.caller = Caller()
        self.turn = threading.RLock()
        self.history = messages.history
        control.waits_for = self._where
        messages.names = [control.names[key[0].index(rank)] for rank in key[1]]
        self._sockets = sockets
        self._ending: Ending | None = None
        self._left: dict[int, float] = {}
        self._fallen: float | None = None
        self._outlasts: float | None = None
        self._known = threading.Event()
        self._lock = threading.Lock()
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="fxdp-watch", daemon=True)
        self._thread.start()

    @property
    def rank(self) -> int:
        """This rank's index in the mesh."""
        return self.control.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the mesh, by their index in it."""
        return self.key[0]

    def _find(self, purpose: str) -> dist.ProcessGroup | None:
        found = self._groups.get(purpose)
        return None if found is None else found()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group over all data axes; None once it was destroyed, or where they have one rank."""
        return self._find("data")

    @property
    def reduce_group(self) -> dist.ProcessGroup | None:
        """A second group for gradient reductions: its own stream on CUDA."""
        return self._find("reduce")

    @property
    def rows_group(self) -> dist.ProcessGroup | None:
        """A group for sharded parameters and the sums of their gradients, once `add_group` has made it."""
        return self._find("rows")

    def has(self, purpose: str) -> bool:
        """Whether there is a group of this purpose."""
        return self._find(purpose) is not None

    def add(self, purpose: str, group: dist.ProcessGroup, sockets: set[OpenSocket]) -> None:
        """One more group, to be cut with the others."""
        self._groups[purpose] = weakref.ref(group)
        self._sockets |= sockets

    @property
    def whole_group(self) -> dist.ProcessGroup | None:
        """A group over all ranks of the mesh: the data axes' own where there is no pipeline axis."""
        return self._find("forward") or self.group

    @property
    def backward_group(self) -> dist.ProcessGroup | None:
        """A group over all ranks of a mesh with a pipeline axis, for what its backwards send."""
        return self._find("backward")

    @property
    def alive(self) -> bool:
        """Whether the default process group, and so these links, still exist."""
        world = self._world()
        return world is not None and dist.GroupMember.WORLD is world

    @property
    def ending(self) -> Ending | None:
        """Why these links can no longer be used, None while they can."""
        return self._ending

    @property
    def handed_bytes(self) -> int:
        """Bytes of this rank's own values that went by messages and through shared memory so far."""
        return self._message_group.handed_bytes

    def stop(self, ending: Ending) -> None:
        """End these links: tell the other ranks why, then cut the groups. The first reason counts."""
        with self._lock:
            self._ending = self._ending or ending
        self.control.last_words(self._ending)
        self._cut()
        self._known.set()

    def cause(self) -> Ending | None:
        """Why a collective broke, waiting a moment for the news; None if no rank said or left anything."""
        if not self._known.wait(_CAUSE_S) and self._left:
            return Ending(min(self._left), EndKind.ENDED)
        return self._ending

    def _explain(self, error: LinkBrokenError | OutOfOrderError) -> Exception:
        """The error for a message that will not come, or that belongs to another call."""
        if not isinstance(error, OutOfOrderError):
            cause = self.cause()
            return RankFailedError(self.words(cause) if cause else str(error))
        place, theirs, mine = error.args
        text = (
            f"rank {self.key[1][place]} came to a sum in {self.history.words(theirs)}, rank "
            f"{self.key[0][self.rank]} in {self.history.words(mine)}: {SAME_ORDER}"
        )
        # all is known, and nobody need wait for the news: the sums of both ranks are mixed up from here on
        self.stop(Ending(self.rank, EndKind.FAILED, text))
        return AgreementError(text)

    def words(self, ending: Ending) -> str:
        """An ending in words, with the rank's global number."""
        return self.control.words(ending)

    def _where(self) -> bytes:
        """What the others are told while this rank waits for them before a call."""
        return _WHERE.pack(self.history.backwards, self.history.now)

    def close(self) -> None:
        """Say goodbye without an error and give everything back; peers that still wait are told."""
        self.control.last_words(Ending(self.rank, EndKind.ENDED))
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def outlast(self) -> None:
        """Wait a little for the end of the rank that has failed, if another has.

        torchrun calls the process that ended first the root cause.
        """
        ending = self._ending
        if ending is not None and ending.kind is EndKind.FAILED and ending.rank != self.rank:
            self._outlasts = self._outlasts or time.monotonic() + _OUTLAST_S  # once, at exit and in the watch
            self.control.outlast(ending.rank, self._outlasts)

    # -- the watch thread ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        peers = {peer.connection.fileno(): peer for peer in self.control.peers}
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for descriptor in peers:
            poll.register(descriptor, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
        woken = False
        while self.alive and not woken:
            for descriptor, _ in poll.poll(1000):
                woken = woken or descriptor == self._wake.fileno()
                if descriptor in peers:
                    poll.unregister(descriptor)
                    self._on_hang_up(peers[descriptor])
            self._check_left()
            self._check_left_out()
            self._check_stuck()
        self.control.last_words(Ending(self.rank, EndKind.ENDED))
        self.outlast()
        if woken:  # the process ends: until then other ranks can see that it has not
            self.control.leave_open()
        else:
            self.control.close()
        self.messages.close()
        if self.memory is not None:
            self.memory.close()
        self._wake.close()
        self._waker.close()

    def _on_hang_up(self, peer: Peer) -> None:
        ending = self.control.drain(peer) or Ending(peer.rank, EndKind.KILLED)
        _log.debug("rank %d: connection to rank %d ended: %s", self.rank, peer.rank, ending.kind.name)
        if ending.kind is EndKind.ENDED:
            self._left[peer.rank] = time.monotonic()
            return
        self._fall(ending)

    def _check_left(self) -> None:
        """A rank ended without error, yet this one is still inside a call, long after its data came."""
        now = time.monotonic()
        if not self.caller.active:
            self._left = dict.fromkeys(self._left, now)
        for rank, since in self._left.items():
            if self._ending is None and now - since > _LEAVE_S:
                self._fall(Ending(rank, EndKind.ENDED))

    def _check_left_out(self) -> None:
        """A rank waits before its next call, while this one is in a backward that the other has not begun.

        It would wait in the sums of that backward for a rank that waits for it.
        """
        if not self.caller.active or self._ending is not None:
            return
        for peer in self.control.peers:
            self.control.drain(peer)
            if peer.waits is None or peer.waits[0] <= self.control.round:
                continue
            backwards, call = _WHERE.unpack(peer.waits[1])
            now = self.history.now
            if self.history.backwards > backwards and self.control.round < peer.waits[0]:
                rank, here = self.key[0][peer.rank], self.key[0][self.rank]
                text = (
                    f"left out {self.history.words(now)}, in which rank {here} waits for it: rank {rank} is "
                    f"in {self.history.words(call)} already; {SAME_ORDER}"
                )
                self._fall(Ending(peer.rank, EndKind.ASTRAY, text))
                return

    def _fall(self, ending: Ending) -> None:
        with self._lock:
            self._ending = self._ending or ending
        self._fallen = self._fallen or time.monotonic()
        self._known.set()
        self._cut()

    def _check_stuck(self) -> None:
        """Another rank has failed and this one is still inside a call.

        A collective ends as its group was cut; Python code by the error raised in it. Last resort, for a
        collective that does not end all the same (gloo can lose a wake-up): the end of the process.
        """
        ending = self._ending
        if not self.caller.active or self._fallen is None or ending is None:
            return
        since = time.monotonic() - self._fallen
        if since > _GRACE_S:
            self.caller.interrupt(self.words(ending))
        if since > _STUCK_S and in_collective(self.caller.frame()):
            sys.stderr.write(
                f"fxdp.errors.RankFailedError: {self.words(ending)}\n"
                f"rank {self.ranks[self.rank]} was still waiting in a collective {_STUCK_S:g} s later and "
                "ends here\n"
            )
            sys.stderr.flush()
            os._exit(1)

    def _cut(self) -> None:
        """Make every wait in the groups end with an error, here and on the other ranks."""
        self.messages.cut()
        cut(self._sockets)
        for group in map(self._find, self._groups):
            if group is not None and "nccl" in group.name().lower():
                group.abort()
