"""Open the communication of a mesh: connections and process groups, made by all ranks together."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from fxdp.errors import MeshError, RankFailedError
from fxdp.ranks.comms.cancellable import made_while_looking
from fxdp.ranks.comms.channel import Channel
from fxdp.ranks.comms.comms import Comms
from fxdp.ranks.comms.control import Control
from fxdp.ranks.comms.descriptors import check_limit, needed, of_hosts
from fxdp.ranks.comms.interfaces import own_address
from fxdp.ranks.comms.live import live_comms, remember
from fxdp.ranks.comms.messages import Messages
from fxdp.ranks.comms.processors import are_alike
from fxdp.ranks.comms.rendezvous import connect_all
from fxdp.ranks.comms.row_transport import OpenRow, RowTransport, open_transport
from fxdp.ranks.comms.sockets import open_sockets, shared_sockets
from fxdp.ranks.liveness.departure import Departure, DepartureKind, as_bytes, as_text
from fxdp.ranks.liveness.failure_broadcast import FailureBroadcast, KeyValueStore, store_lost
from fxdp.ranks.liveness.peers import Peers
from fxdp.ranks.tree.tree_control import TreeControl
from fxdp.ranks.tree.tree_joining import connect_tree
from fxdp.ranks.tree.tree_messages import TreeMessages
from fxdp.settings import Settings
from fxdp.torch_compat import PrefixStore, TCPStore, new_named_group, world_group

_ACROSS = "across"  # the group of ranks on several hosts with the same share of large sums
_DIGEST = 16  # hex digits that identify the ranks in the store: two meshes of one run never share them


def open_comms(
    rank: int, ranks: Sequence[int], row: Sequence[int], backend: str, settings: Settings
) -> Comms:
    """Connect `ranks` of the default process group; all these ranks call this at the same point.

    Parameters
    ----------
    rank : this rank's index in `ranks`.
    ranks : the global ranks of the mesh, in mesh order.
    row : the global ranks that share this rank's stages; all ranks, without a pipeline axis.
    backend : "gloo" or "nccl".
    settings : timeouts and address.

    Raises
    ------
    RankFailedError : a rank did not join in time.
    MeshError : a rank cannot be reached.
    """
    world = world_group()
    assert world is not None, "open_comms needs a process group"
    for comms in live_comms():
        if comms.liveness.departure and comms.liveness.departure.kind is DepartureKind.KILLED:
            raise RankFailedError(comms.control.words(comms.liveness.departure))
    wanted = backend == "gloo" and settings.shared_memory
    is_gloo, above = backend == "gloo", settings.tree_above
    check_limit(len(ranks), needed(len(ranks), len(row), gloo=is_gloo, memory=wanted, tree_above=above))
    store = world.get_group_store()
    try:
        name = _prefix(store, rank, ranks)
        failure_broadcast = FailureBroadcast(store, name, ranks, rank)
    except dist.DistNetworkError as error:
        raise store_lost(error) from error
    peers = Peers(ranks, ranks[rank], lambda other: store.check([f"{name}/{ranks.index(other)}"]))

    def look() -> None:
        failure_broadcast.look()
        peers.look()

    try:
        opening = _Opening(store, name, look, rank, ranks, row, backend, settings)
        return remember(opening.comms(world))
    except BaseException as error:
        failure_broadcast.tell(ranks[rank], _words(error))
        raise


@dataclass(frozen=True)
class _Opening:
    """Parameters of a mesh that is being opened."""

    store: KeyValueStore
    name: str
    look: Callable[[], None]
    rank: int
    ranks: Sequence[int]
    row: Sequence[int]
    backend: str
    settings: Settings

    def comms(self, world: dist.ProcessGroup) -> Comms:
        """Open connections first, as they reveal a rank that dies meanwhile; then make the groups."""
        control, messages = self._connections()
        transport: RowTransport | None = None
        try:
            control.names = self._names(control)
            gloo, memory = self.backend == "gloo", self.settings.shared_memory
            row = OpenRow(control, messages, self._among(), gloo, memory, self._mates)
            transport = open_transport(row)
            own = f"{self.name}/{self.row[0]}"  # shared only by the ranks of this row
            before, made = open_sockets(), partial(self._groups, own, transport)
            groups = self._made(made, control)
            opened = open_sockets() - before
            sockets = shared_sockets(control, opened) if gloo else set()
            transport.measure(groups)
            alike = are_alike(control, "cuda" if self.backend == "nccl" else "cpu")
        except BaseException as error:
            control.broadcast_failure(
                control.news() or Departure(self.rank, DepartureKind.FAILED, _words(error))
            )
            control.close()
            messages.close()
            if transport is not None:
                transport.close()
            raise
        key = (tuple(self.ranks), tuple(self.row), self.backend)
        return Comms(world, key, own, groups, control, messages, transport, sockets, alike)

    def _names(self, control: Channel) -> list[int | str]:
        """What errors call the ranks: their numbers alone, as long as they are on one host."""
        own = f"{socket.gethostname()}\t{open_transport.is_extended}"
        found = [as_text(part).split("\t") for part in control.exchange(as_bytes(own))]
        hosts = [host for host, *_ in found]
        if len({tuple(rest) for _, *rest in found}) > 1:
            without = [
                rank for rank, (_, extended) in zip(self.ranks, found, strict=True) if extended != "True"
            ]
            raise MeshError(
                f"FXDP_WINGS=off on ranks {without}, not on the others; expected the same on all ranks: "
                "without it fxdp sends by gloo or NCCL alone"
            )
        if len(set(hosts)) == 1:
            return list(self.ranks)
        return [f"{rank} (host {host})" for rank, host in zip(self.ranks, hosts, strict=True)]

    def _connections(self) -> tuple[Channel, Messages]:
        timeout_s, among = self.settings.timeout_s, self._among()
        planes, above = (range(len(self.ranks)), among), self.settings.tree_above
        place_of = {rank: place for place, rank in enumerate(among)}
        own = place_of[self.rank]
        given = (
            self.store, self.name, self.rank, planes, self._host(), timeout_s,
            self.look, self.settings.lost_s, above,
        )  # fmt: skip
        trees = len(self.ranks) > above
        found = connect_tree(*given) if trees else [(joined, None) for joined in connect_all(*given)]
        (to_all, place), (to_row, row_place) = found
        in_row = {place_of[rank]: connection for rank, connection in to_row.items()}
        control = partial(TreeControl, self.rank, place) if place else partial(Control, self.rank)
        messages = partial(TreeMessages, own, row_place) if row_place else partial(Messages, own)
        return control(to_all, timeout_s), messages(in_row, timeout_s)

    def _among(self) -> list[int]:
        """Return the indices in the mesh of this row's ranks."""
        places = {rank: place for place, rank in enumerate(self.ranks)}
        return [places[rank] for rank in self.row]

    def _host(self) -> str:
        """Return the address at which all ranks reach this one."""
        launch = self.settings.launch
        master = launch.master_addr if launch else _store_host(self.store)
        return self.settings.host or own_address(master, launch is None or launch.several_hosts)

    def _mates(self, here: Sequence[int], hosts: int) -> Messages:
        """Open connections between the ranks of this host alone, which meet more often than the hosts do."""
        among, own = self._among(), self.row.index(self.ranks[self.rank])
        check_limit(len(self.ranks), of_hosts(len(here), hosts))
        planes, timeout_s = ([among[place] for place in here],), self.settings.timeout_s
        (joined,) = connect_all(
            self.store, f"{self.name}/host/{planes[0][0]}", self.rank, planes, self._host(), timeout_s,
            self.look, self.settings.lost_s,
        )  # fmt: skip
        connections = {place: joined[among[place]] for place in here if place != own}
        return Messages(own, connections, timeout_s)

    def _made(
        self, make: Callable[[], dict[str, dist.ProcessGroup]], control: Channel
    ) -> dict[str, dist.ProcessGroup]:
        def look() -> None:  # without the store, in which the other thread may wait
            departure = control.news()
            if departure is not None:
                raise RankFailedError(control.words(departure))

        # NCCL connects at first use, and remembers the thread's device
        return made_while_looking(make, look) if self.backend == "gloo" else make()

    def _groups(self, own: str, transport: RowTransport) -> dict[str, dist.ProcessGroup]:
        timeout, groups = timedelta(seconds=self.settings.timeout_s), {}
        if len(self.row) > 1:
            for purpose in ("data", "reduce"):
                groups[purpose] = _new_group(own, self.row, self.backend, timeout, purpose)
        if transport.across:
            across = [self.row[place] for place in transport.across]
            groups[_ACROSS] = _new_group(f"{own}/{transport.share}", across, self.backend, timeout, _ACROSS)
        if len(self.row) < len(self.ranks):
            for purpose in ("forward", "backward"):
                groups[purpose] = _new_group(self.name, self.ranks, self.backend, timeout, purpose)
        return groups


def _words(error: BaseException) -> str:
    """Return the message for all ranks; for another rank's failure only the message about that rank."""
    return str(error) if isinstance(error, RankFailedError) else f"{type(error).__name__}: {error}"


def add_group(comms: Comms, purpose: str, settings: Settings, ranks: Sequence[int] = ()) -> dist.ProcessGroup:
    """Add a process group over the data axes or over `ranks`; all ranks must call this at the same point.

    Raises
    ------
    RankFailedError : a rank did not join in time.
    """
    _, row, backend = comms.key
    if (there := comms.find(purpose)) is not None:
        return there
    name = f"{comms.name}/{ranks[0]}" if ranks else comms.name

    def make() -> dist.ProcessGroup:
        return _new_group(name, ranks or row, backend, timedelta(seconds=settings.timeout_s), purpose)

    def look() -> None:
        if comms.liveness.departure is not None:
            raise RankFailedError(comms.control.words(comms.liveness.departure))

    before = open_sockets()
    group = made_while_looking(make, look) if backend == "gloo" else make()
    sockets = shared_sockets(comms.control, open_sockets() - before) if backend == "gloo" else set()
    comms.add(purpose, group, sockets)
    return group


def _store_host(store: Any) -> str | None:
    """Return the host of the store, if it is a TCP store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else None


def _prefix(store: KeyValueStore, rank: int, ranks: Sequence[int]) -> str:
    """Return a key prefix for the n-th mesh among these ranks.

    Each rank counts by itself, with equal results. The prefix is hashed to be short for any number of ranks:
    torch's store refuses keys over 8 KiB.
    """
    digest = hashlib.sha256("-".join(str(item) for item in ranks).encode()).hexdigest()
    name = f"fxdp/{digest[:_DIGEST]}"
    return f"{name}/{store.add(f'{name}/count/{rank}', 1)}"


def _new_group(
    name: str, ranks: Sequence[int], backend: str, timeout: timedelta, purpose: str
) -> dist.ProcessGroup:
    try:
        group = new_named_group(f"{name}/{purpose}", ranks, backend, timeout, f"fxdp_{purpose}")
        if backend == "gloo":
            group.barrier().wait()  # gloo may connect only on first use
    except RuntimeError as error:
        raise RankFailedError(f"making the {backend} group of ranks {list(ranks)} failed: {error}") from error
    return group
