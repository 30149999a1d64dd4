"""The values of one graph on a rank: bytes, owner of the memory, kind, and lifetime.

A bucket takes more memory than its result, because the messages' buffers are not values of the graph:

    start_scatter   pending [rows] and packed [ranks x rows], in shared memory if ranks share memory
    start_gather    pending [ranks x rows], and packed [rows] of casts
    all_reduce      pending; the wait returns the pending memory itself, after packed is freed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.graph.signature import Buffer, Constant, Gradient, Input, InputSpec, Parameter
from fxdp.ir.network.transports import fits_messages, rotating_buffers, transport_of
from fxdp.ir.network.zero_copy_gathers import is_zero_copy
from fxdp.ir.op_kinds import is_view
from fxdp.ir.ops.library import aten
from fxdp.ir.ops.moments import MOMENTS_OP
from fxdp.ir.ops.standardize import STANDARDIZE_BACKWARD_OP, STANDARDIZE_OP
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import ParamShard
from fxdp.ir.types.sizes import B
from fxdp.ir.types.value_types import TensorType, local_shape, tensor_types, type_bytes

_WORDS = {Parameter: "parameters", Buffer: "buffers", Constant: "buffers", Input: "inputs"}
_INSIDE: Mapping[Any, int] = {MOMENTS_OP: 2, STANDARDIZE_OP: 1, STANDARDIZE_BACKWARD_OP: 3}
"""Composite ops, with the number of temporary values of the first operand's size beside the result."""
_IN_PLACE = redistributions.ORDERED | {
    redistributions.all_reduce,
    redistributions.broadcast,
    redistributions.all_reduce_shards,
}
"""Collectives for which the wait returns the pending memory itself."""


@dataclass(frozen=True, slots=True)
class _Moment:
    """Bytes by kind that one op frees before its result, allocates, and leaves without a later reader."""

    node: fx.Node
    dropped: Mapping[str, int]
    added: Mapping[str, int]
    freed: Mapping[str, int]

    @property
    def phase(self) -> str:
        """The phase of the step: `forward` or `backward`."""
        return "backward" if meta(self.node).backward else "forward"


def summed(given: Mapping[InputSpec, int]) -> dict[str, int]:
    """Sum bytes of graph inputs by kind: parameters, buffers, inputs."""
    found = dict.fromkeys(_WORDS.values(), 0)
    for spec, size in given.items():
        if type(spec) in _WORDS:
            found[_WORDS[type(spec)]] += size
    return found


class LiveValues:
    """The lifetimes of the values of one graph at the given sizes.

    `ranks` gives the number of ranks along each axis, and of all ranks under None. `shares` says whether sent
    values are in memory that ranks share, which is not counted here; `shown` says which gathers copy nothing.
    """

    def __init__(
        self, gm: fx.GraphModule, ranks: Mapping[str | None, int], sizes: Mapping[str, int],
        *, shares: bool = False, shown: Callable[[fx.Node], bool] = lambda node: False,
    ) -> None:  # fmt: skip
        self._ranks, self._sizes, self._shares, self._shown = ranks, sizes, shares, shown
        self._nodes = list(gm.graph.nodes)
        self._output, self._returned = gm.graph.output_node(), results_of(gm.graph)
        self._home = self._homes()
        self._gradient_like = self._gradient_path()
        self._last = self._last_readers()
        self._saved = {
            self._home[source]
            for node in self._nodes if meta(node).backward
            for source in node.all_input_nodes if not meta(source).backward
        }  # fmt: skip

    def bytes(self, node: fx.Node) -> int:
        """Return the bytes of this rank's part of a value."""
        if self._shown(node):
            return 0
        types, placed = tensor_types(meta(node).type), meta(node).placement
        placements = placed if isinstance(placed, tuple) else (placed,) * len(types)
        total = 0
        for type_, placement in zip(types, placements, strict=False):
            local = TensorType(type_.dtype, local_shape(type_, placement))
            size = type_bytes(local, self._sizes, unknown=self._sizes[B.name])
            total += -(-size // self._ranks[placement.axis]) if isinstance(placement, ParamShard) else size
        return total

    def given(self) -> dict[InputSpec, int]:
        """Return the bytes of the graph's inputs, which are held all the time."""
        nodes = (n for n in self._nodes if n.op == "placeholder")
        return {spec: self.bytes(n) for n in nodes if (spec := meta(n).spec) is not None}

    def results(self) -> int:
        """Return the bytes of the graph's results."""
        return sum(map(self.bytes, self._output.all_input_nodes))

    def gradients(self) -> int:
        """Return the bytes of the parameters' gradients."""
        of = {meta(n).spec: n for n in self._nodes if n.op == "placeholder"}
        specs = (s.of for s, _ in self._returned if isinstance(s, Gradient))
        return sum(self.bytes(of[s]) for s in specs if isinstance(s, Parameter) and s in of)

    def saved(self) -> int:
        """Return the bytes of values that the forward makes and the backward reads."""
        return sum(map(self.bytes, self.saved_values()))

    def saved_values(self) -> list[fx.Node]:
        """Return the values that the forward makes and the backward reads, in program order."""
        return [node for node in self._nodes if node in self._saved and node.op == "call_function"]

    def moments(self) -> Iterator[_Moment]:
        """Yield a `_Moment` for each op that makes values, in program order."""
        dies: dict[fx.Node, Counter[str]] = {}
        packs: dict[fx.Node, int] = {}
        for value, reader in self._last.items():
            if value.op == "call_function":
                dies.setdefault(reader, Counter())[self._kind(value)] += self.bytes(value)
        for node in self._nodes:
            if node.op != "call_function" or not tensor_types(meta(node).type):
                continue
            added = Counter({self._kind(node): self.bytes(node)} if self._home[node] is node else {})
            unread = Counter(added if node not in self._last and not node.users else {})
            if inside := _INSIDE.get(node.target, 0):
                inside *= self.bytes(node.args[0])
                added["temporary"] += inside
                unread["temporary"] += inside
            if packed := self._packed(node):
                added["buckets"] += packed
                (wait,) = (user for user in node.users if user.target is redistributions.wait)
                packs[wait] = packed  # a wait frees the sent buffer before it makes the result
            dropped = {"buckets": packs.get(node, 0)}
            yield _Moment(node, dropped, added, dies.get(node, Counter()) + unread)

    def top(self, backward: bool) -> Counter[str]:
        """Return the bytes by kind at the peak of forward or backward, without the inputs."""
        live, most = Counter[str](), Counter[str]()
        for moment in self.moments():
            if meta(moment.node).backward is backward:
                live.subtract(moment.dropped)
                live.update(moment.added)
                most = live.copy() if live.total() > most.total() else most
                live.subtract(moment.freed)
        return most

    def _homes(self) -> dict[fx.Node, fx.Node]:
        home: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            source: Any = node.args[0] if node.args else None
            shares = is_view(node.target) or (
                node.target is redistributions.wait and source.target in _IN_PLACE
            )
            home[node] = home[source] if shares and isinstance(source, fx.Node) else node
        return home

    def _last_readers(self) -> dict[fx.Node, fx.Node]:
        last: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            for source in node.all_input_nodes:
                last[self._home[source]] = node
        return last

    def _gradient_path(self) -> set[fx.Node]:
        """Return the values of the backward that are only moved until they are gradients."""
        others = {value for spec, value in self._returned if not isinstance(spec, Gradient)}
        found: set[fx.Node] = set()
        for node in reversed(self._nodes):
            makes = node.op == "call_function" and meta(node).backward and node not in others
            moved = all(u is self._output or (u in found and _moves(u)) for u in node.users)
            if makes and moved and node.users:
                found.add(node)
        return found

    def _kind(self, node: fx.Node) -> str:
        if node.target in (redistributions.all_gather_shards, redistributions.reduce_scatter_shards):
            return "buckets"
        if node in self._gradient_like:
            return "buckets" if node.target is aten.cat.default else "gradients"
        return "saved" if node in self._saved and not meta(node).backward else "temporary"

    def _packed(self, node: fx.Node) -> int:
        """Return the bytes of the copy that a bucket's message reads; 0 without a copy."""
        if node.target is redistributions.reduce_scatter_shards:
            return 0 if self._shares else type_bytes(tensor_type(node), self._sizes)
        if node.target is not redistributions.all_gather_shards:
            return 0
        read: Any = node.args[0]
        values = [read] if isinstance(read, fx.Node) else read
        return sum(self.bytes(value) for value in values if value.op != "placeholder")  # casts


def exchange_buffers(graphs: Sequence[fx.GraphModule], mesh: Mesh) -> int:
    """Return the bytes of the rotating buffers through which ranks of a host exchange large values."""
    buffers = rotating_buffers(direct=mesh.direct_sums)
    nodes = (node for gm in graphs for node in gm.graph.nodes if not is_zero_copy(node, mesh))
    graph_nodes = [(meta(node).backward, node) for node in nodes]
    iterations = [
        size
        for phase in (False, True)
        for backward, node in graph_nodes
        if backward is phase
        and transport_of(node, mesh) in ("memory", "hosts")
        and (size := _sent(node, mesh))
    ]
    if len(iterations) % buffers:  # the next step begins with another buffer
        return buffers * max(iterations)
    return sum(max(iterations[i::buffers], default=0) for i in range(buffers))


def _sent(node: fx.Node, mesh: Mesh) -> int:
    """Return the bytes that a rank writes to its buffer for a collective; 0 for messages and direct reads."""
    size, gathers = type_bytes(tensor_type(node)), node.target is redistributions.all_gather_shards
    if mesh.direct_sums and not (gathers or node.target is redistributions.reduce_scatter_shards):
        return 0
    own = size // mesh.size_along(mesh.shard_axis) if gathers else size
    return 0 if fits_messages(own, mesh.size, summed=not gathers) else own


def _moves(node: fx.Node) -> bool:
    """Return whether an op only moves values."""
    return is_view(node.target) or node.target is aten.cat.default or (
        node.target in redistributions.REDISTRIBUTIONS
    )  # fmt: skip
