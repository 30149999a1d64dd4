"""The transfers between pipeline ranks in a step as data: one row per value, source and destination."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.graph_text import type_text
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import Location, meta
from fxdp.ir.graph.redistribution_cause import unconverted
from fxdp.ir.graph.signature import OutputSpec, Parameter, result_words
from fxdp.ir.types.value_types import TensorType, dtype_name
from fxdp.pipeline.cut.partition import CutEdge, Partition
from fxdp.pipeline.write.stage_shards import PARAMETERS
from fxdp.pipeline.write.step_graph import Sent, waits
from fxdp.reports.plan_data.collective import Collective, Need, Overlapped
from fxdp.reports.plan_data.collective_rows import Reader, described

_TRANSFERS = frozenset({"send_forward", "send_backward", "receive_forward", "receive_backward"})


@dataclass(frozen=True)
class Transfers:
    """Build the rows of all transfers of a step.

    Attributes
    ----------
    steps : the written program of each pipeline rank.
    transport : the transport of all transfers.
    """

    partition: Partition
    reader: Reader
    steps: Sequence[fx.Graph]
    transport: str

    def rows(self, sent: Iterable[Sent]) -> tuple[Collective, ...]:
        """Return one row per value, source, destination and direction; all micro-batches together."""
        groups: dict[tuple[str, int, int, bool], list[Sent]] = {}
        for item in sent:
            groups.setdefault((item.name, item.source, item.target, item.backward), []).append(item)
        edges = {edge.name: edge for edge in self.partition.edges}
        made, specs = self._made(), {name: spec for spec, name, _ in self.partition.results}
        return tuple(self._row(items, edges.get(key[0]), made, specs) for key, items in groups.items())

    def _made(self) -> dict[str, fx.Node]:
        """Return the nodes of all parts by name; one of the parts makes each sent value."""
        parts = self.partition.everything
        return {n.name: n for part in parts for n in part.gm.graph.nodes if n.op == "call_function"}

    def _row(
        self, items: Sequence[Sent], edge: CutEdge | None, made: Mapping[str, fx.Node],
        specs: Mapping[str, OutputSpec],
    ) -> Collective:  # fmt: skip
        first, size = items[0], sum(item.bytes for item in items)
        skip = f", skip {edge.skip}" if edge is not None and edge.skip else ""
        node = made.get(first.name)
        packed = node is None
        issued, waited, overlapped = self._timing(items)
        return Collective(
            name=f"send_{first.name}_{first.source}_to_{first.target}",
            part="",
            kind="send",
            words="sent to another stage",
            bytes=size,
            type=f"{len(first.values)} results" if node is None else type_text(meta(node).type),
            dtype="bytes" if packed or node is None else _dtype(node),
            axis="pp",
            transport=self.transport,
            phase="backward" if first.backward else "forward",
            text=f"{first.name} from pipeline rank {first.source} to {first.target}{skip}",
            needs=tuple(self._need(n, first, edge, made.get(n), specs.get(n)) for n in first.values),
            issued=issued,
            waited=waited,
            overlapped=overlapped,
            count=len(items),
        )

    def _need(
        self, name: str, item: Sent, edge: CutEdge | None, node: fx.Node | None, spec: OutputSpec | None
    ) -> Need:
        reads = f"stage {edge.target}" if edge is not None else f"pipeline rank {item.target}"
        gather = self._gathers.get(name) if item.name == PARAMETERS else None
        if gather is not None:
            return self._of_parameter(name, item, gather)
        made = node or self._result(spec)
        placement = "full" if made is None or node is None else str(meta(made).placement)
        there = "the backward there" if item.backward else "the forward there"
        return Need(
            value=name,
            redistribution="",
            consumer=reads,
            text=f"{reads} for {result_words(spec)}" if spec is not None else reads,
            has=f"{placement} on pipeline rank {item.source}",
            wants=f"{placement} on pipeline rank {item.target}",
            made="" if made is None else described(made),
            read=there if edge is not None else "a result of the step",
            bytes=item.bytes if len(item.values) == 1 else 0,
            location=self.reader.origin.of(
                edge.location if edge is not None else self._location(name, node, spec)
            ),
        )

    def _of_parameter(self, name: str, item: Sent, gather: fx.Node) -> Need:
        """Return the need of a shard that another rank's stages read, for the first reading op there."""
        cause = meta(gather).cause
        return Need(
            value=name,
            redistribution="",
            consumer=f"pipeline rank {item.target}",
            text=f"{name} for {'a stage' if cause is None else cause.text}",
            has=f"rows on pipeline rank {item.source}",
            wants=f"{meta(gather).placement} on pipeline rank {item.target}",
            made=f"parameter {name}",
            read="the stages there, once per step",
            bytes=item.bytes if len(item.values) == 1 else 0,
            location=self.reader.origin.of(Location() if cause is None else cause.location),
        )

    @cached_property
    def _gathers(self) -> dict[str, fx.Node]:
        """The first gather of each sharded parameter, by the parameter's name."""
        found: dict[str, fx.Node] = {}
        for node in self.reader.causes.graph.find_nodes(
            op="call_function", target=redistributions.all_gather_shards
        ):
            rows: Any = node.args[0]
            spec = meta(rows if rows.op == "placeholder" else rows.all_input_nodes[0]).spec
            if isinstance(spec, Parameter):
                found.setdefault(spec.name, node)
        return found

    def _location(self, name: str, node: fx.Node | None, spec: OutputSpec | None) -> Location:
        """Return the location where a value is made; for a piece of a bucket, the location of the result."""
        own = self.reader.nodes.get(name)
        for found in (node, own, self._result(spec)):
            if found is not None and meta(found).location.file:
                return meta(found).location
        return Location()

    def _result(self, spec: OutputSpec | None) -> fx.Node | None:
        """Return the node of a result before reduction."""
        found = next((v for s, v in results_of(self.reader.causes.graph) if s == spec), None)
        return None if found is None else unconverted(found)

    def _timing(self, items: Sequence[Sent]) -> tuple[str, str, Overlapped]:
        """Return the call before the first transfer, the call that waits, and the calls in between."""
        tags = {item.tag for item in items}
        source, target = self.steps[items[0].source], self.steps[items[0].target]
        issued = next((before for before, node in _calls(source) if _tag(node) == items[0].tag), "")
        overlapped, in_flight, waited_at = list[str](), set[Any](), list[int]()
        names = list[str]()
        for _, node in _calls(target):
            if waits(node):
                waited_at += [len(names)] if node.args[0] in in_flight else []
                in_flight.discard(node.args[0])
            elif str(node.target).startswith("receive") and _tag(node) in tags:
                in_flight.add(node)
            elif _is_work(node):
                names.append(node.name)
                overlapped += [node.name] if in_flight else []
        waited = names[waited_at[0]] if waited_at and waited_at[0] < len(names) else ""
        ends = (overlapped[0], overlapped[-1]) if overlapped else ("", "")
        return issued, waited, Overlapped(len(overlapped), *ends)


def _calls(graph: fx.Graph) -> Iterable[tuple[str, fx.Node]]:
    """Yield calls of modules and waits in order, each with the name of the preceding call of a stage."""
    before = ""
    for node in graph.nodes:
        if node.op == "call_module" or waits(node):
            yield before, node
            before = node.name if _is_work(node) else before


def _is_work(node: fx.Node) -> bool:
    """Return whether a node runs a part of the model, and not a transfer, event or buffer."""
    words = ("forward_", "backward_", "input_gradient_", "weight_gradient_", "finish_", "gather_", "prologue")
    return node.op == "call_module" and str(node.target).startswith(words)


def _tag(node: fx.Node) -> Any:
    """Return the tag of the transfer that a node starts or ends."""
    if node.target not in _TRANSFERS:
        return None
    return node.args[2] if str(node.target).startswith("send") else node.args[3]


def _dtype(node: fx.Node) -> str:
    type_ = meta(node).type
    return dtype_name(type_.dtype) if isinstance(type_, TensorType) else ""
