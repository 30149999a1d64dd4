"""What of a half may stand between its segments: collectives of buckets, with what packs and unpacks them.

    half        h.0 ...   h.1 ... sum of bucket 1 ... h.1   h.2 ...
    segments    [h.0]  [h.1]  sum of bucket 1  [h.2]

Buckets begin and end at other places of each layer, so with them no layer would be like the next. Two kinds
of collectives can stand apart, as no op of a layer lies between them and the ends of the half:

    a gather of parameters    reads inputs, or casts of them
    a sum of gradients        is read by results, or by what follows from such sums alone

They run as they are, in the order that they have in the half, which is that of all ranks.
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
    """The calls of a half that may stand between its segments."""
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
    """Whether a call starts a gather of inputs, or of casts of them."""
    return node.target in GATHERS and all(map(_reads_inputs, data_of(node)))


def _hands_on(node: fx.Node, found: set[fx.Node]) -> bool:
    """Whether a call waits for one of these, or shows what it gives differently."""
    read = list(data_of(node))
    shows = _is_seen_differently(node) or any(map(starts_collective, read))
    return shows and bool(read) and found.issuperset(read)


def _reads_inputs(node: fx.Node) -> bool:
    """Whether a node is an input, or computed from inputs by one op."""
    return all(map(_is_input, node.all_input_nodes))


def _sums(graph: fx.Graph) -> set[fx.Node]:
    """Collectives with all that follows from them, where that only hands on what they give."""
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
    """A collective with all that follows from it; nothing where values are computed of it."""
    found, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        users = [u for u in node.users if u.op != "output" and node in data_of(u)]
        if users and not (_moves(node) or communicates(node)):
            return set()  # a cast of a sum, or its addition to another, is the last thing that is done to it
        waiting += [u for u in users if u not in found]
        found.update(users)
    return found


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _is_seen_differently(node: fx.Node) -> bool:
    return is_view(node.target) or is_part(node)


def _moves(node: fx.Node) -> bool:
    """Whether a call packs values, or shows them differently."""
    return _is_seen_differently(node) or node.target is aten.cat.default


def data_of(node: fx.Node) -> Iterator[fx.Node]:
    """What a call reads, without what must only be there before it starts."""
    if node.target in STARTS:
        yield from node.args[0]  # type: ignore[misc]
    else:
        yield from node.all_input_nodes


class InsideError(Exception):
    """A call cannot stand between segments."""

    def __init__(self, region: int, call: fx.Node) -> None:
        super().__init__(f"{call} belongs inside of segment {region}")
        self.region = region
        self.call = call


def places_between(
    calls: Sequence[fx.Node], regions: Sequence[Sequence[fx.Node]], position: Mapping[fx.Node, int],
    *, hides: bool = True,
) -> list[list[fx.Node]]:  # fmt: skip
    """Where calls stand: before the first segment, after it, ...

    A call that lies inside of a segment comes before it. After it come what reads what the segment makes, the
    start of a gather that the segment does not read, and the wait for a sum. What a gather has `after` has
    done its work when halves are cut: from here on its place says when it starts.

    Parameters
    ----------
    hides : collectives that are under way during half a segment's work stay so.

    Raises
    ------
    InsideError : a segment would wait for itself so, more gathered values would be there at once than in the
        half, or `hides` could not be.
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
        if starts_collective(node):  # in one order on all ranks
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
    """Let what packs values for a sum come with the sum.

    A gather that only waits for a value (`after`) does not read it: such a gather may start before the value
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
    """What reads the values that a start gathers."""
    found, waiting = set[fx.Node](), [start]
    while waiting:
        for user in waiting.pop().users:
            if starts_collective(user):  # that comes after this one, and no more
                continue
            if _is_seen_differently(user) or communicates(user):
                waiting.append(user)
            else:
                found.add(user)
    return found


def _check_room(
    read_in: Mapping[fx.Node, set[int]], place: Mapping[fx.Node, int], position: Mapping[fx.Node, int]
) -> None:
    """Raise where more gathered values are there at once than in the half."""
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
    """Raise where a collective that work hides would be waited for at once."""
    begins = [min(position[node] for node in region) for region in regions]
    work, much = sorted(position[n] for s in regions for n in s), max(map(len, regions)) // 2
    for node in calls:
        for start in filter(starts_collective, data_of(node)):
            overlapped = bisect(work, position[node]) - bisect(work, position[start])
            if overlapped >= much and place[start] == place[node]:
                raise InsideError(max(bisect(begins, position[start]) - 1, 0), start)


def is_part(node: fx.Node) -> bool:
    """Whether a node takes a result out of several, which no code could hand to another as they are."""
    return node.target is operator.getitem


def with_parts(node: fx.Node) -> Iterator[fx.Node]:
    """A call, and what is taken out of its results."""
    yield node
    for user in node.users:
        if is_part(user):
            yield from with_parts(user)
