"""What pipeline ranks send one another in a step, as data: one row per value, from and to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from fxdp.ir import conversions
from fxdp.ir.conversion_cause import unconverted
from fxdp.ir.graph_text import type_text
from fxdp.ir.graphs import results_of
from fxdp.ir.notes import Site, note
from fxdp.ir.slots import Parameter, ResultSlot, result_words
from fxdp.ir.types import TensorType, dtype_name
from fxdp.pipeline.cut.partition import CutEdge, Partition
from fxdp.pipeline.write.dealt_parameters import PARAMETERS
from fxdp.pipeline.write.step_graph import Sent, waits
from fxdp.reports.plan_data.collective import Collective, Hidden, Need
from fxdp.reports.plan_data.collective_rows import Reader, described

_TRANSFERS = frozenset({"send_forward", "send_backward", "receive_forward", "receive_backward"})


@dataclass(frozen=True)
class Transfers:
    """Makes the rows of all transfers of a step.

    Attributes
    ----------
    steps : the written program of each pipeline rank.
    carrier : what carries them.
    """

    partition: Partition
    reader: Reader
    steps: Sequence[fx.Graph]
    carrier: str

    def rows(self, sent: Iterable[Sent]) -> tuple[Collective, ...]:
        """One row per value, from and to, and direction; all micro-batches together."""
        groups: dict[tuple[str, int, int, bool], list[Sent]] = {}
        for item in sent:
            groups.setdefault((item.name, item.source, item.target, item.backward), []).append(item)
        edges = {edge.name: edge for edge in self.partition.edges}
        made, slots = self._made(), {name: slot for slot, name, _ in self.partition.results}
        return tuple(self._row(items, edges.get(key[0]), made, slots) for key, items in groups.items())

    def _made(self) -> dict[str, fx.Node]:
        """The nodes of all parts by name: what is sent is made in one of them."""
        cut = self.partition
        every = (cut.prologue, *cut.gathers, *cut.parts, *cut.epilogues)
        parts = [part for part in every if part is not None]
        return {n.name: n for part in parts for n in part.gm.graph.nodes if n.op == "call_function"}

    def _row(
        self, items: Sequence[Sent], edge: CutEdge | None, made: Mapping[str, fx.Node],
        slots: Mapping[str, ResultSlot],
    ) -> Collective:  # fmt: skip
        first, size = items[0], sum(item.bytes for item in items)
        skip = f", skip {edge.skip}" if edge is not None and edge.skip else ""
        node = made.get(first.name)
        packed = node is None
        issued, waited, hidden = self._timing(items)
        return Collective(
            name=f"send_{first.name}_{first.source}_to_{first.target}",
            part="",
            kind="send",
            words="sent to another stage",
            bytes=size,
            type=f"{len(first.values)} results" if node is None else type_text(note(node).type),
            dtype="bytes" if packed or node is None else _dtype(node),
            axis="pp",
            carrier=self.carrier,
            phase="backward" if first.backward else "forward",
            text=f"{first.name} from pipeline rank {first.source} to {first.target}{skip}",
            needs=tuple(self._need(n, first, edge, made.get(n), slots.get(n)) for n in first.values),
            issued=issued,
            waited=waited,
            hidden=hidden,
            count=len(items),
        )

    def _need(
        self, name: str, item: Sent, edge: CutEdge | None, node: fx.Node | None, slot: ResultSlot | None
    ) -> Need:
        reads = f"stage {edge.target}" if edge is not None else f"pipeline rank {item.target}"
        gather = self._gathers.get(name) if item.name == PARAMETERS else None
        if gather is not None:
            return self._of_parameter(name, item, gather)
        made = node or self._result(slot)
        placement = "whole" if made is None or node is None else str(note(made).placement)
        there = "the backward there" if item.backward else "the forward there"
        return Need(
            value=name,
            conversion="",
            consumer=reads,
            text=f"{reads} for {result_words(slot)}" if slot is not None else reads,
            has=f"{placement} on pipeline rank {item.source}",
            wants=f"{placement} on pipeline rank {item.target}",
            made="" if made is None else described(made),
            read=there if edge is not None else "a result of the step",
            bytes=item.bytes if len(item.values) == 1 else 0,
            site=self.reader.origin.of(edge.site if edge is not None else self._site(name, node, slot)),
        )

    def _of_parameter(self, name: str, item: Sent, gather: fx.Node) -> Need:
        """Rows of a parameter that another rank's stages read: for the op that first reads it there."""
        cause = note(gather).cause
        return Need(
            value=name,
            conversion="",
            consumer=f"pipeline rank {item.target}",
            text=f"{name} for {'a stage' if cause is None else cause.text}",
            has=f"rows on pipeline rank {item.source}",
            wants=f"{note(gather).placement} on pipeline rank {item.target}",
            made=f"parameter {name}",
            read="the stages there, once per step",
            bytes=item.bytes if len(item.values) == 1 else 0,
            site=self.reader.origin.of(Site() if cause is None else cause.site),
        )

    @cached_property
    def _gathers(self) -> dict[str, fx.Node]:
        """The first gather of each sharded parameter, by the parameter's name."""
        found: dict[str, fx.Node] = {}
        for node in self.reader.causes.graph.find_nodes(op="call_function", target=conversions.gather_rows):
            rows: Any = node.args[0]
            slot = note(rows if rows.op == "placeholder" else rows.all_input_nodes[0]).slot
            if isinstance(slot, Parameter):
                found.setdefault(slot.name, node)
        return found

    def _site(self, name: str, node: fx.Node | None, slot: ResultSlot | None) -> Site:
        """Where a value is made; of one that was cut out of a bucket, where the result is."""
        own = self.reader.nodes.get(name)
        for found in (node, own, self._result(slot)):
            if found is not None and note(found).site.file:
                return note(found).site
        return Site()

    def _result(self, slot: ResultSlot | None) -> fx.Node | None:
        """What a result is made of, before it is reduced."""
        found = next((v for s, v in results_of(self.reader.causes.graph) if s == slot), None)
        return None if found is None else unconverted(found)

    def _timing(self, items: Sequence[Sent]) -> tuple[str, str, Hidden]:
        """The stage's call after which the first leaves, the one that waits for it, and what runs between."""
        tags = {item.tag for item in items}
        source, target = self.steps[items[0].source], self.steps[items[0].target]
        issued = next((before for before, node in _calls(source) if _tag(node) == items[0].tag), "")
        hidden, under_way, waited_at = list[str](), set[Any](), list[int]()
        names = list[str]()
        for _, node in _calls(target):
            if waits(node):
                waited_at += [len(names)] if node.args[0] in under_way else []
                under_way.discard(node.args[0])
            elif str(node.target).startswith("receive") and _tag(node) in tags:
                under_way.add(node)
            elif _is_work(node):
                names.append(node.name)
                hidden += [node.name] if under_way else []
        waited = names[waited_at[0]] if waited_at and waited_at[0] < len(names) else ""
        ends = (hidden[0], hidden[-1]) if hidden else ("", "")
        return issued, waited, Hidden(len(hidden), *ends)


def _calls(graph: fx.Graph) -> Iterable[tuple[str, fx.Node]]:
    """Calls of modules and waits in order, each with the name of the stage's call before it."""
    before = ""
    for node in graph.nodes:
        if node.op == "call_module" or waits(node):
            yield before, node
            before = node.name if _is_work(node) else before


def _is_work(node: fx.Node) -> bool:
    """Whether it runs a part of the model: no transfer, event or buffer."""
    words = ("forward_", "backward_", "input_gradient_", "weight_gradient_", "finish_", "gather_", "prologue")
    return node.op == "call_module" and str(node.target).startswith(words)


def _tag(node: fx.Node) -> Any:
    """The number of the transfer that a node is an end of."""
    if node.target not in _TRANSFERS:
        return None
    return node.args[2] if str(node.target).startswith("send") else node.args[3]


def _dtype(node: fx.Node) -> str:
    type_ = note(node).type
    return dtype_name(type_.dtype) if isinstance(type_, TensorType) else ""


