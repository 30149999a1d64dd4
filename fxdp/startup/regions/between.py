"""Collectives of buckets, with their packing and unpacking, that can run between compiled regions.

    graph      h.0 ...   h.1 ... sum of bucket 1 ... h.1   h.2 ...
    regions    [h.0]  [h.1]  sum of bucket 1  [h.2]

Buckets begin and end at a different place in each layer, so with buckets inside, no two layers would be
equal. Two kinds of collectives can run between regions, because no op of a layer is between them and an end
of the graph:

    all-gather of parameters    reads inputs, or casts of inputs
    reduction of gradients      read by results, or by ops that depend on such reductions alone

Interleaved collectives run op by op, in the order of the graph, which is equal on all ranks.
"""

from __future__ import annotations

import operator
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from fxdp.ir.op_kinds import is_view
from fxdp.ir.ops.parameter_shards import GATHERS, STARTS
from fxdp.lowering.inductor.collective_order import communicates, starts_collective
from fxdp.torch_compat import aten


def calls_between(graph: fx.Graph) -> set[fx.Node]:
    """Return the calls of a graph that may run between regions."""
    found = _sums(graph)
    for node in graph.nodes:
        if node.op == "call_function" and (_gathers(node) or _hands_on(node, found)):
            found.add(node)
    for node in reversed(graph.nodes):
        packs = _moves(node) or _reads_inputs(node)
        if node.op == "call_function" and packs and node.users and found.issuperset(node.users):
            found.add(node)
    return found


def _gathers(node: fx.Node) -> bool:
    """Return whether a call starts an all-gather of inputs, or of casts of inputs."""
    return node.target in GATHERS and all(map(_reads_inputs, data_of(node)))


def _hands_on(node: fx.Node, found: set[fx.Node]) -> bool:
    """Return whether a call waits for a call in `found`, or is a view or part of such a call's result."""
    read = list(data_of(node))
    shows = _is_seen_differently(node) or any(map(starts_collective, read))
    return shows and bool(read) and found.issuperset(read)


def _reads_inputs(node: fx.Node) -> bool:
    """Return whether a node is an input, or is computed from inputs by one op."""
    return all(map(_is_input, node.all_input_nodes))


def _sums(graph: fx.Graph) -> set[fx.Node]:
    """Return the reductions whose results are passed on without further computation, with dependent calls."""
    starts = [n for n in graph.nodes if starts_collective(n) and n.target not in GATHERS]
    sums = {start: found for start in starts if (found := _handed_on(start))}
    while True:
        all_ = set[fx.Node]().union(*sums.values())
        needs_more = [
            start for start, found in sums.items()
            if any(not _is_input(n) for call in found - {start} for n in set(data_of(call)) - all_)
        ]  # fmt: skip
        if not needs_more:
            return all_
        for start in needs_more:
            del sums[start]


def _handed_on(start: fx.Node) -> set[fx.Node]:
    """Return a collective with all dependent calls; empty if an op computes with the result."""
    found, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        users = [u for u in node.users if u.op != "output" and node in data_of(u)]
        if users and not (_moves(node) or communicates(node)):
            return set()  # the last op may be a cast of the sum or an addition to another
        waiting += [u for u in users if u not in found]
        found.update(users)
    return found


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _is_seen_differently(node: fx.Node) -> bool:
    return is_view(node.target) or is_part(node)


def _moves(node: fx.Node) -> bool:
    """Return whether a call packs values or is a view."""
    return _is_seen_differently(node) or node.target is aten.cat.default


def data_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the values that a call reads, without values that only order the start of a collective."""
    if node.target in STARTS:
        yield from node.args[0]  # type: ignore[misc]
    else:
        yield from node.all_input_nodes


class InsideError(Exception):
    """Raised if a call cannot run between regions."""

    def __init__(self, region: int, call: fx.Node) -> None:
        super().__init__(f"{call} belongs inside of segment {region}")
        self.region = region
        self.call = call


def places_between(
    calls: Sequence[fx.Node], regions: Sequence[Sequence[fx.Node]], position: Mapping[fx.Node, int],
    *, hides: bool = True,
) -> list[list[fx.Node]]:  # fmt: skip
    """Return the calls to run before the first region, after the first region, and so on.

    A call in the middle of a region moves before this region. A reader of the region's results, the start of
    a gather that the region does not read, and the wait for a reduction move after the region. A gather's
    ordering operand `after` only matters until partitioning; here the place determines when a gather starts.

    Parameters
    ----------
    hides : keep collectives overlapped that are in flight during half of a region's work.

    Raises
    ------
    InsideError : the order would be cyclic, more gathered values would be alive at once than in the original
        order, or `hides` cannot be satisfied.
    """
    made_in = {node: k for k, region in enumerate(regions, 1) for node in region}
    begins, ends = ([end(position[node] for node in region) for region in regions] for end in (min, max))
    starts = [node for node in calls if node.target in GATHERS]
    read_in = {start: {made_in[n] for n in _readers(start) if n in made_in} for start in starts}
    place: dict[fx.Node, int] = {}
    last = 0
    for node in calls:
        ready = max((place.get(n, made_in.get(n, 0)) for n in data_of(node)), default=0)
        begun = bisect(begins, position[node])
        inside = begun > 0 and position[node] < ends[begun - 1]
        before = inside and (begun in read_in[node] if node in read_in else not _waits_for_sum(node))
        chosen = ready if _is_seen_differently(node) else max(ready, begun - before)  # views cost nothing
        if starts_collective(node):  # starts keep one order on all ranks
            chosen = last = max(last, chosen)
        place.update(dict.fromkeys(with_parts(node), chosen))
    _bring_packing(calls, place)
    for node, k in place.items():
        if late := [number for user in node.users if (number := made_in.get(user, k + 1)) <= k]:
            raise InsideError(min(late) - 1, node)
    _check_room(read_in, place, position)
    if hides:
        _check_overlapped(calls, place, position, regions)
    return [[node for node in calls if place[node] == k] for k in range(len(regions) + 1)]


def _bring_packing(calls: Sequence[fx.Node], place: dict[fx.Node, int]) -> None:
    """Move packing calls directly before the reduction that reads the packed values.

    A gather that only waits for a value (`after`) does not read this value, and may start before the value
    exists.
    """
    for node in reversed(calls):
        users = [
            user for part in with_parts(node) for user in part.users
            if not is_part(user) and part in data_of(user)
        ]  # fmt: skip
        if _moves(node) and users and all(user in place for user in users):
            place.update(dict.fromkeys(with_parts(node), min(place[user] for user in users)))


def _waits_for_sum(node: fx.Node) -> bool:
    return any(starts_collective(n) and n.target not in GATHERS for n in data_of(node))


def _readers(start: fx.Node) -> set[fx.Node]:
    """Return the calls that read the gathered values of a start."""
    found, waiting = set[fx.Node](), [start]
    while waiting:
        for user in waiting.pop().users:
            if starts_collective(user):  # the next collective: orders, but does not read
                continue
            if _is_seen_differently(user) or communicates(user):
                waiting.append(user)
            else:
                found.add(user)
    return found


def _check_room(
    read_in: Mapping[fx.Node, set[int]], place: Mapping[fx.Node, int], position: Mapping[fx.Node, int]
) -> None:
    """Raise if more gathered values would be alive at once than in the original order."""
    spans = [(position[start], max((position[n] for n in _readers(start)), default=0)) for start in read_in]
    most = max((sum(a <= at <= b for a, b in spans) for at, _ in spans), default=0)
    for start in read_in:
        number = place[start] + 1
        if sum(place[n] < number <= max(read_in[n], default=0) for n in read_in) > most:
            raise InsideError(number - 1, start)


def _check_overlapped(
    calls: Sequence[fx.Node], place: Mapping[fx.Node, int], position: Mapping[fx.Node, int],
    regions: Sequence[Sequence[fx.Node]],
) -> None:  # fmt: skip
    """Raise if a collective that is overlapped with work would be waited for at once."""
    begins = [min(position[node] for node in region) for region in regions]
    work, much = sorted(position[n] for s in regions for n in s), max(map(len, regions)) // 2
    for node in calls:
        for start in filter(starts_collective, data_of(node)):
            overlapped = bisect(work, position[node]) - bisect(work, position[start])
            if overlapped >= much and place[start] == place[node]:
                raise InsideError(max(bisect(begins, position[start]) - 1, 0), start)


def is_part(node: fx.Node) -> bool:
    """Return whether a node selects one of several results, which a region cannot pass on as a tuple."""
    return node.target is operator.getitem


def with_parts(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a call and the nodes that select parts of the call's result."""
    yield node
    for user in node.users:
        if is_part(user):
            yield from with_parts(user)
