"""Schedule the starts of parameter buckets: prefetch each one bucket ahead of the use, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.graphs import inputs_of, reachable
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.parameter_buckets import gather_starts, pieces, scatter_steps, wait_of
from fxdp.ir.graph.signature import Tangent
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.value_types import TensorType


class _Schedule:
    """Rewrite of one graph: move the starts of collectives, and tie each to earlier values."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._tangents = [node for _, node in inputs_of(graph, Tangent)]
        self._later = reachable(self._tangents)
        """All nodes computed from a tangent, which exist in a backward only."""

    def gathers(self, backward: bool) -> None:
        """Start each bucket's all-gather after the wait for the previous bucket, before the latter's use."""
        starts = gather_starts(self._graph, backward=backward)
        waits = [wait_of(start) for start in starts]
        position = {node: i for i, node in enumerate(self._graph.nodes)}
        for before, start in zip([None, *waits], starts, strict=False):
            if before is not None:
                self._last_piece(before, position).append(start)
            reads = waits[0] if before is None else before
            if backward or before is not None:
                _add_after(start, self._ready(reads, position, backward))

    def gathers_first(self) -> None:
        """Gather all buckets before anything else runs, so that the gathers depend on parameters alone."""
        starts = gather_starts(self._graph, backward=False)
        last = [*self._graph.find_nodes(op="placeholder")][-1]
        for cast in (n for start in starts for n in start.all_input_nodes if n.op != "placeholder"):
            last.append(cast)
            last = cast
        before: fx.Node | None = None
        for start in [*starts, None]:
            if start is not None:
                last.append(start)
                last = start
            if before is not None:
                last = _move_after(last, before)
            before = start

    def _last_piece(self, flat: fx.Node, position: dict[fx.Node, int]) -> fx.Node:
        return max({flat, *pieces(flat)}, key=position.__getitem__)

    def _ready(self, flat: fx.Node, position: dict[fx.Node, int], backward: bool) -> list[fx.Node]:
        """Return a value that is ready when a bucket is first used.

        For a backward, this is a value that no forward computes.
        """
        own = pieces(flat)
        end = self._last_piece(flat, position)
        users = sorted({u for piece in own for u in piece.users} - own, key=lambda n: position.get(n, -1))
        for user in users:
            for source in user.all_input_nodes:
                earlier = position.get(source, len(position)) < position[end] and source not in own
                # a start without data dependency may be moved to the very front
                there = _is_tensor(source) and source.target not in redistributions.COLLECTIVES
                if earlier and there and (not backward or source in self._later):
                    return [source]
        return self._nearest(end, position) if backward else []

    def _nearest(self, end: fx.Node, position: dict[fx.Node, int]) -> list[fx.Node]:
        """Return the backward's last value before a node, for buckets used together with no tangent."""
        # redistributions are excluded: gradient reductions are bucketed and moved to the end after this pass
        found = [
            n for n in self._later
            if position.get(n, len(position)) < position[end]
            and _is_tensor(n)
            and n.target not in redistributions.REDISTRIBUTIONS
        ]  # fmt: skip
        return [max(found, key=position.__getitem__)] if found else self._tangents[:1]

    def scatters(self) -> None:
        """Wait for each gradient bucket after the next one's start, and for the last one at the end."""
        starts = self._graph.find_nodes(op="call_function", target=redistributions.reduce_scatter_shards)
        for start, following in zip(starts, [*starts[1:], None], strict=False):
            steps = scatter_steps(start)[1:]
            where = following if following is not None else self._graph.output_node().prev
            # a gradient bucket is in flight while the next is filled; an immediate wait would overlap nothing
            for step in steps:
                where.append(step)
                where = step
            if following is None:
                self._finish_last(starts)

    def _finish_last(self, starts: Sequence[fx.Node]) -> None:
        """Move slices of gradient buckets, and casts of these, to the end, after the last wait."""
        output = self._graph.output_node()
        waits = {scatter_steps(start)[-1] for start in starts}
        later = reachable(waits) - waits - {output}
        for node in [node for node in self._graph.nodes if node in later]:
            output.prepend(node)

    def chain(self) -> None:
        """Let each start read the previous one of its phase, so that no compiler can reorder the starts."""
        last: dict[bool, fx.Node] = {}
        for node in list(self._graph.nodes):
            if node.target in redistributions.ORDERED:
                backward = meta(node).backward
                _add_after(node, [last[backward]] if backward in last else [])
                last[backward] = node


def _move_after(place: fx.Node, start: fx.Node) -> fx.Node:
    """Move the wait for a start, and the slices of the result, behind a node; return the last moved node."""
    done = wait_of(start)
    own = [done, *(node for piece in done.users for node in (piece, *piece.users))]
    for node in own:
        place.append(node)
        place = node
    return place


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(meta(node).type, TensorType)


def _add_after(start: fx.Node, values: Iterable[fx.Node]) -> None:
    reads, each, after = start.args
    more = tuple(value for value in values if value not in after)  # type: ignore[operator]
    start.args = (reads, each, (*after, *more))  # type: ignore[misc]
    meta(start).operands = (*meta(start).operands, *(None for _ in more))


@dataclass(frozen=True)
class SchedulePrefetch:
    """Prefetch each parameter bucket while the previous one is used; at most two are in memory at once.

    Buckets of parameters that are read throughout, as formed by `bucket-parameters`, stay in addition.

    before: `%all_gather_shards_1 = all_gather_shards([%w2], (8,), ())` right before the first use of `%w2`
    after:  `%all_gather_shards_1 = all_gather_shards([%w2], (8,), (%x, %all_gather_shards))` before the use
            of the previous bucket: `%x` is ready then, and the previous start comes first on all ranks

    In the backward the ready value depends on a tangent, so that no partitioner moves the gather into the
    forward. The wait for a bucket of gradients comes after the start of the next bucket.

    Parameters
    ----------
    first : gather all parameters, one bucket ahead, before anything else runs and from local shards alone. A
        step before which no shard has changed can then leave these gathers out.
    """

    first: bool = False

    name = "schedule-prefetch"
    requires = Level.LOCAL
    ensures = Level.LOCAL

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        if mesh.size_along(mesh.shard_axis) == 1:  # the shard of a single data rank is the full value
            return gm
        schedule = _Schedule(gm.graph)
        if self.first:
            schedule.gathers_first()
        else:
            schedule.gathers(backward=False)
            schedule.gathers(backward=True)
        schedule.scatters()
        schedule.chain()
        return gm
