"""Read the collectives of a program from its graphs, as `Collective` rows or as shorter `CommRow` rows."""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from fxdp.capture.locations import Origin, is_user_file
from fxdp.ir import redistributions
from fxdp.ir.graph.graph_text import target_text, type_text
from fxdp.ir.graph.metadata import Cause, Location, is_host_size, meta
from fxdp.ir.network.transports import transport_name
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.sizes import B
from fxdp.ir.types.value_types import dtype_name, tensor_types, type_bytes
from fxdp.reports.plan_data.collective import Collective, Need, Overlapped
from fxdp.reports.rows import CommRow
from fxdp.rules.registry import registry

_PACKING = frozenset({"bucket", "coalesce", "rows"})
"""The rules of nodes that only pack values side by side."""
_A_RESULT = "a result of the step"


@dataclass(frozen=True)
class Reader:
    """Find the causes of collectives in the program before bucketing, with one value per collective.

    Attributes
    ----------
    causes : the program before bucketing.
    sizes : the values of the size symbols.
    origin : maps lines inside torch's own modules to the user's lines.
    """

    causes: fx.GraphModule
    sizes: Mapping[str, int]
    origin: Origin = field(default_factory=Origin)

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """The nodes of `causes` by name."""
        return {node.name: node for node in self.causes.graph.nodes}

    def need(self, cause: Cause) -> Need:
        """Return the reason why one value is communicated."""
        producer, consumer = self.nodes.get(cause.producer), self.nodes.get(cause.consumer)
        redistribution = _redistribution(producer, cause)
        through = (
            str(Location(cause.location.file, cause.location.line)) if _is_torchs(cause.location) else ""
        )
        return Need(
            value=cause.producer,
            redistribution="" if redistribution is None else redistribution.name,
            consumer=cause.consumer,
            text=cause.text or cause.consumer,
            has="" if producer is None else str(meta(producer).placement),
            wants="" if redistribution is None else str(meta(redistribution).placement),
            made="" if producer is None else described(producer),
            read=_A_RESULT if consumer is None or consumer.op == "output" else described(consumer),
            bytes=0 if producer is None else self._bytes(producer, cause),
            location=self.origin.of(cause.location),
            through=through,
            gradient=cause.gradient,
        )

    def _bytes(self, producer: fx.Node, cause: Cause) -> int:
        """Return the bytes of the value, or of the communicated piece of the value."""
        type_ = meta(producer).type
        if cause.elements is None:
            return type_bytes(type_, self.sizes, unknown=self.sizes.get(B.name))
        return cause.elements * tensor_types(type_)[0].dtype.itemsize


def _redistribution(producer: fx.Node | None, cause: Cause) -> fx.Node | None:
    """Return the node that redistributes the value, preferably the one inserted for this consumer."""
    if producer is None:
        return None
    made = [n for n in (*producer.users, producer) if n.target in redistributions.COLLECTIVES]
    own = [n for n in made if (found := meta(n).cause) is not None and found.consumer == cause.consumer]
    return next(iter([*own, *made]), None)


def _is_torchs(location: Location) -> bool:
    return bool(location.file) and not is_user_file(location.file)


def described(node: fx.Node) -> str:
    """Name an op with the rule that placed the op: `aten.mm (rule product_of_two of einsum)`."""
    known = meta(node)
    if node.op == "placeholder":
        return "an input of the step"
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return described(node.args[0])
    name = known.decomposed_from or target_text(node.target)
    rule = registry.get(node.target)
    family = "" if rule is None else f" of {rule.family}"
    return name if known.reason is None else f"{name} (rule {known.reason}{family})"


def communication(
    gm: fx.GraphModule, sizes: Mapping[str, int], origin: Origin | None = None
) -> tuple[CommRow, ...]:
    """Return one row per collective in the graph, in order, with bytes at the given sizes.

    With an `origin`, the location of a row is the user's own line, also for ops inside torch's modules.
    """
    nodes = (node for node in gm.graph.nodes if node.target in redistributions.COLLECTIVES)
    return tuple(_comm_row(node, sizes, origin) for node in nodes)


def _comm_row(node: fx.Node, sizes: Mapping[str, int], origin: Origin | None) -> CommRow:
    known = meta(node)
    cause = known.cause or Cause("", "", known.location)
    phase = "backward" if known.backward else "forward"
    op, location = (
        target_text(node.target),
        str(cause.location if origin is None else origin.of(cause.location)),
    )
    # a size that depends on data counts as large as the batch
    size = type_bytes(known.type, sizes, unknown=sizes.get(B.name))
    return CommRow(op, size, 1, cause.text, location, phase, cause.gradient)


def collectives_of(
    gm: fx.GraphModule, reader: Reader, mesh: Mesh | None = None, part: str = ""
) -> tuple[Collective, ...]:
    """Return the collectives of one graph, in the order of issue."""
    order = list(gm.graph.nodes)
    position = {node: i for i, node in enumerate(order)}
    work = [i for i, node in enumerate(order) if _computes(node)]
    return tuple(
        _collective(node, reader, mesh, part, _timing(node, order, position, work))
        for node in order
        if node.target in redistributions.COLLECTIVES and _travels(node, mesh)
    )


def _travels(node: fx.Node, mesh: Mesh | None) -> bool:
    """Return whether the axis has several ranks; micro-batches, which passes count as ranks, are ignored."""
    found = redistributions.redistribution_of(node)
    return mesh is None or found is None or mesh.size_along(found.axis) > 1


def _collective(
    node: fx.Node, reader: Reader, mesh: Mesh | None, part: str, timing: tuple[str, str, Overlapped]
) -> Collective:
    known, found = meta(node), redistributions.redistribution_of(node)
    cause = known.cause or Cause(node.name, node.name, known.location)
    assert found is not None
    axes = () if mesh is None else mesh.axes
    issued, waited, overlapped = timing
    (type_, *_) = tensor_types(known.type)
    return Collective(
        name=node.name,
        part=part,
        kind=target_text(node.target),
        words=found.words,
        bytes=type_bytes(known.type, reader.sizes, unknown=reader.sizes.get(B.name)),
        type=type_text(type_),
        dtype=dtype_name(type_.dtype),
        axis=found.axis or ", ".join(axes),
        transport="" if mesh is None else transport_name(node, mesh),
        phase="backward" if known.backward else "forward",
        text=cause.text or cause.consumer,
        needs=tuple(reader.need(one) for one in cause.each),
        issued=issued,
        waited=waited,
        overlapped=overlapped,
        gradient=cause.gradient,
    )


def _computes(node: fx.Node) -> bool:
    """Return whether a node is work of the model, which can overlap with a message."""
    if node.op != "call_function" or node.target in redistributions.REDISTRIBUTIONS or is_host_size(node):
        return False
    return node.target is not operator.getitem and meta(node).reason not in _PACKING


def _timing(
    node: fx.Node, order: Sequence[fx.Node], position: Mapping[fx.Node, int], work: Sequence[int]
) -> tuple[str, str, Overlapped]:
    """Return the op before the issue, the op that follows the wait, and the ops in between."""
    start = position[node]
    end = next((position[user] for user in node.users if user.target is redistributions.wait), start)
    i, j = bisect_left(work, start), bisect_right(work, end)
    names = [order[work[k]].name if 0 <= k < len(work) else "" for k in (i - 1, i, j - 1, j)]
    before, first, last, after = names
    return before, after, Overlapped(j - i, first, last) if j > i else Overlapped()
