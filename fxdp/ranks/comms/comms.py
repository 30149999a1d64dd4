"""All that joins the ranks of one mesh.

    main thread     collectives on its groups, small ones on `messages`, rounds on `control`
    watch thread    sleeps until another rank ends (`comms/watch.py`)

A rank that fails says so on the control channel first and cuts its groups after, so every other rank knows
the cause when its own wait breaks. Links live as long as the process group, so `find_comms` can hand the same
ones to every compiled module.
"""

from __future__ import annotations

import threading
import weakref

import torch.distributed as dist

from fxdp.errors import AgreementError, RankFailedError
from fxdp.ir.link_cost import LinkCost
from fxdp.ranks.comms.channel import Channel
from fxdp.ranks.comms.departure import Departure, DepartureKind
from fxdp.ranks.comms.group import MessageGroup
from fxdp.ranks.comms.host_sums import HostSums
from fxdp.ranks.comms.interrupt import Caller
from fxdp.ranks.comms.messages import LinkBrokenError, Messages, OutOfOrderError
from fxdp.ranks.comms.sequence_log import SAME_ORDER
from fxdp.ranks.comms.shared_memory import SharedMemory
from fxdp.ranks.comms.shared_windows import SharedWindows
from fxdp.ranks.comms.sockets import OpenSocket, cut
from fxdp.ranks.comms.stragglers import StragglerDetection
from fxdp.ranks.comms.watch import Watch
from fxdp.torch_compat import collectives_begun, register_group

_PURPOSES = ("data", "reduce", "rows", "forward", "backward")
"""Of groups: over all data axes, for the forward, for gradients, which have a stream of their own on CUDA,
and for sharded parameters; over all ranks of a mesh with a pipeline axis, for what each phase sends.
"""


class Comms:
    """Process groups and control channel of one mesh on one rank; made by `opening.open_comms`.

    Attributes
    ----------
    key : the global ranks joined, those of this rank's row, and the backend.
    name : what the names of the row's groups begin with.
    control : short messages between all ranks.
    messages : small tensors between the ranks of the row; programs reach it by `message_group_name`.
    memory : large sums between them, by the same name; None where the ranks do not share memory.
    hosts : the same where they are on several hosts, and share memory there; None where that is no faster.
    windows : rows of sharded parameters, seen where they lie; None where the ranks do not share memory.
    cost : of sums over the network between them; None where they need none, or NCCL has it.
    alike : whether all ranks compute the same bits of the same operands.
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
        control: Channel,
        messages: Messages,
        memory: SharedMemory | None,
        hosts: HostSums | None,
        sockets: set[OpenSocket],
        cost: LinkCost | None = None,
        alike: bool = True,
    ) -> None:
        self._world = weakref.ref(world)  # torch alone owns groups: destroying them frees them at once
        self.key = key
        self.name = name
        self._groups = {purpose: weakref.ref(group) for purpose, group in groups.items()}
        self.control = control
        self.messages = messages
        self.message_group_name = f"{name}/messages"
        self.memory = memory
        self.hosts = hosts
        self.cost = cost
        self.alike = alike
        size = len(key[1])
        self.region_windows = None if memory is None else SharedWindows(messages, size)
        self._message_group = MessageGroup(messages, size, self._explain, memory, hosts, self.region_windows)
        register_group(self.message_group_name, self._message_group)
        self.caller = Caller()
        self.iteration = threading.RLock()
        self.sequence_log = messages.sequence_log
        name_of = dict(zip(key[0], control.names, strict=True))
        messages.names = [name_of[rank] for rank in key[1]]
        if hosts is not None:
            hosts.messages.names, hosts.messages.sequence_log = messages.names, messages.sequence_log
        self._sockets = sockets
        self._stragglers = StragglerDetection(control, self.caller, self.sequence_log, self._begun)
        self._watch = Watch(
            control, self.caller, self.sequence_log, lambda: self.alive, self._cut, self._give_back
        )
        self._watch.begin()

    @property
    def rank(self) -> int:
        """This rank's index in the mesh."""
        return self.control.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the mesh, by their index in it."""
        return self.key[0]

    def find(self, purpose: str) -> dist.ProcessGroup | None:
        """The group of this purpose, once it was made and as long as it lives."""
        found = self._groups.get(purpose)
        return None if found is None else found()

    def add(self, purpose: str, group: dist.ProcessGroup, sockets: set[OpenSocket]) -> None:
        """One more group, to be cut with the others."""
        self._groups[purpose] = weakref.ref(group)
        self._sockets |= sockets

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        """A group over all ranks of the mesh: the data axes' own where there is no pipeline axis."""
        return self.find("forward") or self.find("data")

    @property
    def alive(self) -> bool:
        """Whether the default process group, and so these links, still exist."""
        world = self._world()
        return world is not None and dist.GroupMember.WORLD is world

    @property
    def departure(self) -> Departure | None:
        """Why these links can no longer be used, None while they can."""
        return self._watch.departure

    def stop(self, departure: Departure) -> None:
        """End these links: tell the other ranks why, then cut the groups. The first reason counts."""
        self._watch.stop(departure)

    def cause(self) -> Departure | None:
        """Why a collective broke, waiting a moment for the news; None if no rank said or left anything."""
        return self._watch.cause()

    def late(self) -> str | None:
        """Who has not come to a collective whose time is up, and where they are; None if nobody is late."""
        return self._stragglers.late(lambda: self.departure is not None)

    def _begun(self) -> tuple[int, ...]:
        found = [self._world(), *map(self.find, _PURPOSES)]
        return tuple(0 if group is None else collectives_begun(group) for group in found)

    def close(self) -> None:
        """Say goodbye without an error and give everything back; peers that still wait are told."""
        self._watch.close()

    def outlast(self) -> None:
        """Wait a little for the end of the rank that has failed, if another has."""
        self._watch.outlast()

    @property
    def handed_bytes(self) -> int:
        """Bytes of this rank's own values that went by messages and through shared memory so far."""
        return self._message_group.handed_bytes

    def _explain(self, error: LinkBrokenError | OutOfOrderError) -> Exception:
        """The error for a message that will not come, or that belongs to another call."""
        if not isinstance(error, OutOfOrderError):
            cause = self.cause()
            return RankFailedError(self.words(cause) if cause else str(error))
        place, theirs, mine = error.args
        text = (
            f"rank {self.key[1][place]} came to a sum in {self.sequence_log.words(theirs)}, rank "
            f"{self.key[0][self.rank]} in {self.sequence_log.words(mine)}: {SAME_ORDER}"
        )
        # all is known, and nobody need wait for the news: the sums of both ranks are mixed up from here on
        self.stop(Departure(self.rank, DepartureKind.FAILED, text))
        return AgreementError(text)

    def settle(self) -> None:
        """Wait until all ranks have read the rows that this call or backward has shown.

        Raises
        ------
        RankFailedError : another rank failed or died.
        """
        if self.region_windows is not None:
            with self._message_group.explained():
                self.region_windows.settle()

    def words(self, departure: Departure) -> str:
        """An ending in words, with the rank's global number."""
        return self.control.words(departure)

    def _cut(self) -> None:
        """Make every wait in the groups end with an error, here and on the other ranks."""
        self.messages.cut()
        if self.hosts is not None:
            self.hosts.messages.cut()
        cut(self._sockets)
        for group in map(self.find, self._groups):
            if group is not None and "nccl" in group.name().lower():
                group.abort()

    def _give_back(self) -> None:
        """Close what the watch does not."""
        self.messages.close()
        if self.memory is not None:
            self.memory.close()
        if self.region_windows is not None:
            self.region_windows.close()
        if self.hosts is not None:
            self.hosts.close()
