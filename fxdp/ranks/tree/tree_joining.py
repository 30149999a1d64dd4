"""Connect the ranks of a tree: each rank asks the store only for the addresses of neighbors.

every rank   fxdp/<ranks>/1/5         writes an address, and the first rank of the row             1 request
rank 0       reads all addresses at once, and writes each rank's calls, callers and places
every rank   fxdp/<ranks>/1/place/5   reads the entry of this rank                                 1 request
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fxdp.errors import RankFailedError
from fxdp.ranks.comms.accepting import Rendezvousing
from fxdp.ranks.comms.addresses import Addresses
from fxdp.ranks.comms.rendezvous import listening, met
from fxdp.ranks.liveness.failure_broadcast import KeyValueStore
from fxdp.ranks.tree.tree_shape import ARITY, TreePlace, tree_places

_FEW = 8
_SAYS_S = 3.0  # for rank 0's report on missing ranks


def connect_tree(
    store: KeyValueStore,
    prefix: str,
    rank: int,
    planes: Sequence[Sequence[int]],
    host: str,
    timeout_s: float,
    look: Callable[[], None],
    lost_s: float,
    tree_above: int,
) -> list[tuple[dict[int, socket.socket], TreePlace | None]]:
    """Connect this rank to all neighbors; for parameters and errors see `rendezvous.connect_all`.

    Return the connections by rank of the mesh, and the place in the tree by index: of the entire mesh, then
    of this rank's row. The place is None if a row is small enough to be connected all to all.
    """
    size, row = len(planes[0]), planes[1]
    addresses = Addresses(store, prefix, timeout_s, size, tree_above)
    with listening(host, ARITY) as listener:
        addresses.publish(rank, host, listener.getsockname()[1], row[0])
        if rank == 0:
            addresses.wait_for(range(size), look)
            own = _assign_neighbors(store, prefix, addresses, size, tree_above)
        else:

            def late() -> None:  # rank 0 knows the missing ranks, and reports them
                addresses.check_time([], later_s=2 * addresses.look_s + _SAYS_S)

            addresses.wait_for([], look)  # the token first: there are no places if rank 0 connects all to all
            (own,) = addresses.read([f"{prefix}/place/{rank}"], look, late)
        calls, answers, places = _read(own)
        addresses.know({other: where for (_, other), where in calls.items()})
        found = met(Rendezvousing(addresses, rank, calls, answers, look), listener, lost_s)
    return list(zip([*found, {}, {}], places, strict=False))


def _assign_neighbors(
    store: KeyValueStore, prefix: str, addresses: Addresses, size: int, tree_above: int
) -> str:
    """Write each rank's neighbors to the store; return the entry of rank 0."""
    rows: dict[int, list[int]] = {}
    for rank in range(size):
        rows.setdefault(addresses.rows[rank], []).append(rank)
    entries = _neighbours(addresses.of, [range(size)], list(rows.values()), tree_above)
    texts = [json.dumps(entries[rank], separators=(",", ":")) for rank in range(size)]
    writes: Any = store  # missing from torch's types
    writes.multi_set([f"{prefix}/place/{rank}" for rank in range(1, size)], texts[1:])
    return texts[0]


def _neighbours(
    address: Callable[[int], tuple[str, int]],
    full: Sequence[Sequence[int]],
    rows: Sequence[Sequence[int]],
    tree_above: int,
) -> Mapping[int, Mapping[str, Any]]:
    """Return each rank's entry: the ranks to call with addresses, the ranks that call, and the places."""
    found: dict[int, dict[str, Any]] = {
        rank: {"calls": [], "answers": [], "places": [None, None]} for group in full for rank in group
    }
    for plane, group in [(0, group) for group in full] + [(1, row) for row in rows]:
        for caller, called in _pairs(found, plane, group, address, tree_above):
            found[caller]["calls"].append([plane, called, *address(called)])
            found[called]["answers"].append([plane, caller])
    return found


def _pairs(
    found: Mapping[int, dict[str, Any]],
    plane: int,
    group: Sequence[int],
    address: Callable[[int], tuple[str, int]],
    tree_above: int,
) -> Iterator[tuple[int, int]]:
    """Yield the pairs (caller, called) of a group; record places if the group is a tree."""
    if plane and len(group) <= tree_above:
        yield from ((caller, called) for caller in group for called in group if called < caller)
        return
    # tests ask for trees of a few ranks, which have several levels only with few children per rank
    arity = ARITY if tree_above >= _FEW else tree_above
    places = tree_places([address(rank)[0] for rank in group], arity)
    for rank, place in zip(group, places, strict=True):
        found[rank]["places"][plane] = [place.size, place.parent, place.children, place.counts, place.order]
        if place.parent is not None:
            yield rank, group[place.parent]


_Read = tuple[
    dict[tuple[int, int], tuple[str, int]], list[tuple[int, int]], tuple[TreePlace, TreePlace | None]
]


def _read(text: str) -> _Read:
    try:
        entry = json.loads(text)
        calls = {(int(p), int(other)): (str(host), int(port)) for p, other, host, port in entry["calls"]}
        answers = [(int(plane), int(other)) for plane, other in entry["answers"]]
        full, row = (place and _place(*place) for place in entry["places"])
        if full is None:
            raise ValueError("no place")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RankFailedError(
            f"the process group's store has no place in the tree of ranks for this one ({error}); expected "
            "what rank 0 of the same release of fxdp writes"
        ) from error
    return calls, answers, (full, row)


def _place(size: int, parent: int | None, *lists: Sequence[int]) -> TreePlace:
    children, counts, order = (tuple(map(int, each)) for each in lists)
    return TreePlace(int(size), None if parent is None else int(parent), children, counts, order)
