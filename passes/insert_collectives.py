"""Insert a node for every redistribution between placements."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxdp.errors import PlacementError
from fxdp.ir import redistributions
from fxdp.ir.graph.draws import node_draws
from fxdp.ir.graph.graph_text import target_text
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import Cause, copy_meta, meta, tensor_operands
from fxdp.ir.graph.parameter_buckets import rows_of
from fxdp.ir.graph.redistribution_cause import cause_of
from fxdp.ir.network.zero_copy_gathers import fills_pages_of_memory
from fxdp.ir.routes import between, route
from fxdp.ir.types.mesh import REGATHER, Mesh
from fxdp.ir.types.placements import ParamShard, Partial, Placement, R, Replicate, Shard
from fxdp.ir.types.value_types import ScalarType, TensorType


@dataclass
class _Insertion:
    """Redistributions inserted so far, one per (value, placement, phase)."""

    graph: fx.Graph
    mesh: Mesh
    replicable: frozenset[fx.Node]
    unsharded_once: bool
    kept: frozenset[str]
    made: dict[tuple[fx.Node, Placement, bool], fx.Node] = field(default_factory=dict)
    full: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def redistribute(self, node: fx.Node, wanted: Placement, consumer: fx.Node, cause: Cause) -> fx.Node:
        """Return `node`'s value in the wanted placement, redistributed before `consumer` if needed."""
        have = meta(node).placement
        if have == wanted:
            return node
        key = node, wanted, self._in_backward(node, consumer)
        found = self.made.get(key)
        if found is None:
            source = self._left_near(node, cause) if key[2] else node
            found = self.made[key] = self._make(source, wanted, consumer, cause)
        return found

    def _left_near(self, node: fx.Node, cause: Cause) -> fx.Node:
        """Return the node from which a backward gathers a parameter.

        This is a post-forward shard if the mesh has a `post_forward_size`, except of parameters that ranks
        gather without a copy (`fxdp/ir/network/zero_copy_gathers.py`).
        """
        full = self.made.get((node, R, False))
        # a zero-copy gather costs nothing, whatever the number of ranks
        if not self.mesh.post_forward_size or full is None or fills_pages_of_memory(node, self.mesh):
            return node
        return self.redistribute(full, ParamShard(REGATHER), full.next, cause)

    def _in_backward(self, node: fx.Node, consumer: fx.Node) -> bool:
        """Return whether the backward needs a separate redistribution.

        An unsharded parameter lives in one phase.
        """
        if (
            self.unsharded_once
            or not isinstance(meta(node).placement, ParamShard)
            or not meta(consumer).backward
        ):
            return False
        parameter = rows_of(node)
        return parameter is None or parameter.name not in self.kept

    def _make(self, node: fx.Node, wanted: Placement, consumer: fx.Node, cause: Cause) -> fx.Node:
        have, type_ = meta(node).placement, meta(node).type
        assert isinstance(have, Replicate | Partial | Shard | ParamShard)
        first, *more = route(have, wanted)
        if isinstance(have, Shard) and self._is_full_locally(node):
            if wanted == R:
                return self._replicated_clone(node) or self._rematerialized(node, consumer, cause)
            more = [first]  # the full value needs no traffic, even if a direct redistribution would
        if more:
            by: Placement = between(wanted) if isinstance(wanted, ParamShard) else R
            by = by if first.converts(have, by) else R
            return self.redistribute(self.redistribute(node, by, consumer, cause), wanted, consumer, cause)
        assert isinstance(type_, TensorType)
        try:
            arguments = first.arguments(type_, have, wanted)
        except PlacementError as error:
            raise PlacementError(f"%{node.name}: {error}") from None
        make = self._collective if first.communicates else self._local
        made = make(node, first.target, arguments, wanted, consumer, cause)
        axis = first.along(have, wanted)
        if axis is not None:
            start = made.args[0] if made.target is redistributions.wait else made
            assert isinstance(start, fx.Node)
            start.kwargs = {"axis": axis}
        return made

    def _local(
        self, node: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], wanted: Placement,
        consumer: fx.Node, cause: Cause,
    ) -> fx.Node:  # fmt: skip
        """Insert a slice or mask of a replicated value right before the first use; causes no traffic."""
        with self.graph.inserting_before(consumer):
            made = self.graph.call_function(target, (node, *args))
        copy_meta(
            node, made, placement=wanted, spec=None, cause=cause, operands=(R,), reason="redistribute",
            backward=meta(node).backward or meta(consumer).backward, rewrite=None,
        )  # fmt: skip
        return made

    def _collective(
        self, node: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], wanted: Placement,
        consumer: fx.Node, cause: Cause,
    ) -> fx.Node:  # fmt: skip
        """Insert a collective right after the value is computed, and the wait right before the first use."""
        # as early as possible: the nodes between start and wait overlap the collective
        with self.graph.inserting_after(self._anchor(node)):
            pending = self.graph.call_function(target, (node, *args))
        have = meta(node).placement
        copy_meta(node, pending, placement=wanted, spec=None, cause=cause, operands=(have,),
                  backward=meta(node).backward or self._in_backward(node, consumer),
                  reason="redistribute", rewrite=None)  # fmt: skip
        with self.graph.inserting_before(consumer):
            done = self.graph.call_function(redistributions.wait, (pending,))
        copy_meta(pending, done, cause=None, operands=(wanted,))
        return done

    def _is_full_locally(self, node: fx.Node) -> bool:
        """Return whether each rank can have the full value of a sharded node without traffic."""
        return node.target in redistributions.LOCAL or node in self.replicable or meta(node).rematerialized

    def _replicated_clone(self, node: fx.Node) -> fx.Node | None:
        """Return a copy of the node computed from full operands, or None if it depends on sharded data."""
        if node.target in redistributions.LOCAL:
            return node.args[0]  # type: ignore[return-value]
        if _is_full(node):
            return node
        if node in self.full:
            return self.full[node]
        if node not in self.replicable:
            return None
        clones = {}
        for source in node.all_input_nodes:
            clone = source if _is_host(source) else self._replicated_clone(source)
            assert clone is not None
            clones[source] = clone
        with self.graph.inserting_after(node):
            made = self.graph.node_copy(node, lambda n: clones[n])
        old = meta(node)
        placement = tuple(p and R for p in old.placement) if isinstance(old.placement, tuple) else R
        copy_meta(node, made, placement=placement, operands=(R,) * len(old.operands), rewrite=None)
        self.full[node] = made
        return made

    def _rematerialized(self, node: fx.Node, consumer: fx.Node, cause: Cause) -> fx.Node:
        """Recompute the node from the full values of the operands, right before the first use."""
        fulls = {}
        for source in node.all_input_nodes:
            cut = source.target in redistributions.LOCAL
            original = source.args[0] if cut else source
            assert isinstance(original, fx.Node)
            fulls[source] = source if _is_host(source) else self.redistribute(original, R, consumer, cause)
        with self.graph.inserting_before(consumer):
            made = self.graph.node_copy(node, fulls.__getitem__)
        copy_meta(node, made, placement=R, operands=(R,) * len(meta(node).operands), rewrite=None,
                  rematerialized=False, backward=meta(consumer).backward)  # fmt: skip
        return made

    def _anchor(self, node: fx.Node) -> fx.Node:
        """Return the node itself, or the last placeholder for a placeholder.

        Collectives start after all inputs.
        """
        if node.op != "placeholder":
            return node
        last = node
        while last.next.op == "placeholder":
            last = last.next
        return last

    def synchronize(self, node: fx.Node, cause: Cause) -> None:
        """Broadcast rank 0's draw of a random value that must be equal on all ranks."""
        # listed before the broadcast, which becomes a user itself, is inserted
        users = list(node.users)
        done = self._collective(node, redistributions.broadcast, (), R, node.next, cause)
        for user in users:
            user.replace_input_with(node, done)


def _replicable(nodes: list[fx.Node]) -> frozenset[fx.Node]:
    """Return the values that each rank can compute in full: they are full, or depend on full values only."""
    found: set[fx.Node] = set()
    for node in nodes:
        if _is_full(node) or _is_host(node):
            found.add(node)
        elif node.op != "call_function" or node_draws(node) or meta(node).decomposed_from:
            continue  # a step of a decomposition computes its rank's part and nothing else
        elif all(a in found for a in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _is_full(node: fx.Node) -> bool:
    placement = meta(node).placement
    return all(p in (R, None) for p in placement) if isinstance(placement, tuple) else placement == R


def _is_host(node: fx.Node) -> bool:
    return isinstance(meta(node).type, ScalarType)


def _edges(node: fx.Node) -> list[tuple[int, fx.Node, Placement]]:
    """Return (position, operand, needed placement) of each operand that must be redistributed."""
    wanted = meta(node).operands
    sources = list(node.args[0]) if node.op == "output" else tensor_operands(node)  # type: ignore[arg-type]
    if not wanted:
        return []
    return [
        (i, s, p)
        for i, (s, p) in enumerate(zip(sources, wanted, strict=True))
        if p is not None and meta(s).placement != p
    ]


def _rewire(node: fx.Node, replacements: dict[int, fx.Node]) -> None:
    """Replace tensor operands by position, because one value may be needed in two placements."""
    position = -1

    def visit(argument: fx.Node) -> fx.Node:
        nonlocal position
        if not isinstance(meta(argument).type, TensorType):
            return argument
        position += 1
        return replacements.get(position, argument)

    node.args = fx.map_arg(node.args, visit)
    node.kwargs = fx.map_arg(node.kwargs, visit)


@dataclass(frozen=True)
class InsertCollectives:
    """Insert a node for each redistribution, once per value, with the cause; afterwards no edge needs one.

    before: `return gradient param(fc.weight)=%mm` with `%mm {dp=P(sum)}`
    after:  `%all_reduce = all_reduce(%mm, sum)  # gradient of fc.weight` and `%wait = wait(%all_reduce)`

    A collective starts right after the operand is computed, and the wait comes right before the first use.
    Values that depend on no sharded data are computed in full instead of being gathered. Random values that
    must be equal on all ranks are broadcast from rank 0 unless `single_device_rng`.

    A sharded parameter is gathered once for the forward and once for the backward. With `unsharded_once`, or
    for a parameter named in `kept`, one all-gather serves both. The backward gathers only parameters that are
    read there. If the mesh has a `post_forward_size`, the forward reshards each full value over groups of
    this many ranks, and the backward gathers within these groups.
    """

    single_device_rng: bool = False
    unsharded_once: bool = False
    kept: frozenset[str] = frozenset()

    name = "insert-collectives"
    requires = Level.PLACED
    ensures = Level.EXPLICIT

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        nodes = list(gm.graph.nodes)
        if mesh.size == 1 and not any(isinstance(meta(n).placement, ParamShard) for n in nodes):
            return gm
        insertion = _Insertion(gm.graph, mesh, _replicable(nodes), self.unsharded_once, self.kept)
        for node in nodes:
            edges = _edges(node)
            if edges:
                _rewire(
                    node, {i: insertion.redistribute(s, p, node, cause_of(node, s, i)) for i, s, p in edges}
                )
        if not self.single_device_rng:
            _synchronize_random(insertion, nodes)
        return gm


def _synchronize_random(insertion: _Insertion, nodes: list[fx.Node]) -> None:
    for node in nodes:
        known = meta(node)
        if not node_draws(node) or node.target is operator.getitem:
            continue
        values = [node] if isinstance(known.type, TensorType) else list(node.users)
        for value in values:
            if meta(value).placement == R:
                text = f"{target_text(node.target)} must draw the same numbers on all ranks"
                insertion.synchronize(value, Cause(node.name, node.name, known.location, text))
