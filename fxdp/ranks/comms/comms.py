"""All communication of one rank in one mesh.

    main thread     collectives on process groups, small ones on `messages`, rounds on `control`
    watch thread    sleeps until a rank ends (`liveness/liveness.py`)

A rank that fails first reports this on the control channel and then cuts all groups, so every rank knows the
cause when a wait there breaks. A `Comms` lives as long as the process group, so `find_comms` can return the
same object for every compiled module.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch.distributed as dist

from fxdp.errors import AgreementError, RankFailedError
from fxdp.ranks.comms.channel import Channel
from fxdp.ranks.comms.messages import LinkBrokenError, Messages, OutOfOrderError
from fxdp.ranks.comms.row_transport import RowTransport
from fxdp.ranks.comms.sequence_log import SAME_ORDER
from fxdp.ranks.comms.sockets import OpenSocket, cut
from fxdp.ranks.liveness.liveness import Liveness
from fxdp.torch_compat import collectives_begun, world_group

_PURPOSES = ("data", "reduce", "rows", "forward", "backward")
"""Purposes of process groups.

"data" is for the forward over all data axes, "reduce" for gradients, which have a stream of their own on
CUDA, "rows" for sharded parameters; "forward" and "backward" span all ranks of a mesh with a pipeline axis.
"""


class Comms:
    """Process groups and control channel of one mesh on one rank; made by `opening.open_comms`.

    Attributes
    ----------
    key : the global ranks of the mesh, the global ranks of this rank's row, and the backend.
    name : prefix of the names of the row's groups.
    control : short messages between all ranks.
    messages : small tensors between the ranks of the row.
    transport : the transport between them beside the process groups.
    alike : True if all ranks compute bitwise equal results from equal operands.
    iteration : the lock that the thread inside a compiled call holds.
    sequence_log : the calls and backwards that this rank has begun.
    liveness : notices late and dead ranks, and stops this one.
    """

    def __init__(
        self,
        world: dist.ProcessGroup,
        key: tuple[tuple[int, ...], tuple[int, ...], str],
        name: str,
        groups: dict[str, dist.ProcessGroup],
        control: Channel,
        messages: Messages,
        transport: RowTransport,
        sockets: set[OpenSocket],
        alike: bool = True,
    ) -> None:
        self._world = weakref.ref(world)  # torch alone owns groups: destroying them frees them at once
        self.key = key
        self.name = name
        self._groups = {purpose: weakref.ref(group) for purpose, group in groups.items()}
        self.control = control
        self.messages = messages
        self.transport = transport
        self.alike = alike
        self.iteration = threading.RLock()
        self.sequence_log = messages.sequence_log
        name_of = dict(zip(key[0], control.names, strict=True))
        messages.names = [name_of[rank] for rank in key[1]]
        transport.join(name, messages.names, self._explain, self.sequence_log)
        self._sockets = sockets
        self.liveness = Liveness(
            control, self.sequence_log, lambda: self.alive, self._cut, self._give_back, self._begun
        )

    @property
    def rank(self) -> int:
        """Index of this rank in the mesh."""
        return self.control.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the mesh, by index."""
        return self.key[0]

    def find(self, purpose: str) -> dist.ProcessGroup | None:
        """Return the group for this purpose, if it has been made and still exists."""
        found = self._groups.get(purpose)
        return None if found is None else found()

    def add(self, purpose: str, group: dist.ProcessGroup, sockets: set[OpenSocket]) -> None:
        """Add a group, which is cut together with all groups."""
        self._groups[purpose] = weakref.ref(group)
        self._sockets |= sockets

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        """A group over all ranks of the mesh; without a pipeline axis, the group of the data axes."""
        return self.find("forward") or self.find("data")

    @property
    def alive(self) -> bool:
        """True while the default process group, and so this object, can be used."""
        world = self._world()
        return world is not None and world_group() is world

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call a function, which must not keep this object, as the default process group is destroyed."""
        world = self._world()
        if world is not None:
            weakref.finalize(world, call).atexit = False

    def _begun(self) -> tuple[int, ...]:
        found = [self._world(), *map(self.find, _PURPOSES)]
        return tuple(0 if group is None else collectives_begun(group) for group in found)

    def _explain(self, error: LinkBrokenError | OutOfOrderError) -> Exception:
        """Return the error for a message that will not arrive, or that belongs to a different call."""
        if not isinstance(error, OutOfOrderError):
            cause = self.liveness.cause()
            return RankFailedError(self.control.words(cause) if cause else str(error))
        place, theirs, mine = error.args
        text = (
            f"rank {self.key[1][place]} came to a sum in {self.sequence_log.words(theirs)}, rank "
            f"{self.key[0][self.rank]} in {self.sequence_log.words(mine)}: {SAME_ORDER}"
        )
        # no need to wait for news: the sums of both ranks are mixed up from here on
        self.liveness.fail(text)
        return AgreementError(text)

    def _cut(self) -> None:
        """Make every wait in the groups end with an error, here and on all ranks."""
        self.messages.cut()
        self.transport.cut()
        cut(self._sockets)
        for group in map(self.find, self._groups):
            if group is not None and "nccl" in group.name().lower():
                group.abort()

    def _give_back(self) -> None:
        """Release the resources that the watch does not close."""
        self.messages.close()
        self.transport.close()
