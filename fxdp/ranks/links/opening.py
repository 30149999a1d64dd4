"""Make the links of a mesh: connections and process groups, which all ranks open together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from fxdp.errors import RankFailedError
from fxdp.ranks.links.control import Control, EndKind
from fxdp.ranks.links.links import Links, live_links
from fxdp.ranks.links.messages import Messages
from fxdp.ranks.links.rendezvous import KeyValueStore, connect_all, own_address
from fxdp.ranks.links.shared_memory import SharedMemory, probe
from fxdp.ranks.links.sockets import OpenSocket, open_sockets
from fxdp.settings import Settings
from fxdp.torch_compat import new_named_group

_DIGEST = 16  # hex digits that name some ranks in the store: two meshes of one run never share them


def open_links(
    rank: int, ranks: Sequence[int], row: Sequence[int], backend: str, settings: Settings
) -> Links:
    """Join `ranks` (of the default process group) by links; all of them must call this at the same point.

    Parameters
    ----------
    rank : this rank's index in `ranks`.
    ranks : the global ranks of the mesh, in mesh order.
    row : those of them that share this rank's stages; all, where there is no pipeline axis.
    backend : "gloo" or "nccl".
    settings : timeouts and address.

    Raises
    ------
    RankFailedError : a rank did not come.
    MeshError : a rank cannot be reached.
    """
    world = dist.GroupMember.WORLD
    assert world is not None, "open_links needs a process group"
    for links in live_links():
        if links.ending and links.ending.kind is EndKind.KILLED:
            raise RankFailedError(str(links.ending))
    store = world.get_group_store()
    prefix = _prefix(store, rank, ranks)
    host = settings.host or own_address(settings.launch.master_addr if settings.launch else None)
    connections = connect_all(store, prefix, rank, len(ranks), host, settings.timeout_s)
    control = Control(rank, connections, settings.timeout_s)
    place = row.index(ranks[rank])
    own = f"{prefix}/{row[0]}"  # what only the ranks of this row share
    connections = connect_all(store, f"{own}/messages", place, len(row), host, settings.timeout_s)
    messages = Messages(place, connections, settings.timeout_s)
    memory = None
    wanted = backend == "gloo" and settings.shared_memory
    if len(ranks) > 1 and probe(control, [ranks.index(r) for r in row], wanted) and len(row) > 1:
        memory = SharedMemory(messages, len(row))
    before = open_sockets()
    timeout = timedelta(seconds=settings.timeout_s)
    groups = {}
    if len(row) > 1:
        groups = {p: _new_group(own, row, backend, timeout, p) for p in ("data", "reduce")}
    if len(row) < len(ranks):
        for purpose in ("forward", "backward"):
            groups[purpose] = _new_group(prefix, ranks, backend, timeout, purpose)
    sockets = _shared_sockets(control, open_sockets() - before) if backend == "gloo" else set()
    key = (tuple(ranks), tuple(row), backend)
    return Links(world, key, own, groups, control, messages, memory, sockets)


def add_group(links: Links, purpose: str, settings: Settings) -> None:
    """Make one more group over the data axes if there is none; all ranks must call this at the same point.

    Raises
    ------
    RankFailedError : a rank did not come.
    """
    _, row, backend = links.key
    if links.has(purpose):
        return
    before = open_sockets()
    group = _new_group(links.name, row, backend, timedelta(seconds=settings.timeout_s), purpose)
    sockets = _shared_sockets(links.control, open_sockets() - before) if backend == "gloo" else set()
    links.add(purpose, group, sockets)


def _prefix(store: KeyValueStore, rank: int, ranks: Sequence[int]) -> str:
    """A key prefix for the n-th links among these ranks: each rank counts for itself, all alike.

    It is as long for 10,000 ranks as for two: torch's store refuses keys over 8 KiB.
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


def _shared_sockets(control: Control, opened: set[OpenSocket]) -> set[OpenSocket]:
    """Those of `opened` whose other end is a socket that another rank opened meanwhile."""
    mine = [[item.here, item.there] for item in opened]
    theirs: set[tuple[tuple[str, int], tuple[str, int]]] = set()
    for rank, data in enumerate(control.exchange(json.dumps(mine).encode())):
        if rank != control.rank:
            theirs |= {((here[0], here[1]), (there[0], there[1])) for here, there in json.loads(data)}
    return {item for item in opened if (item.there, item.here) in theirs}
