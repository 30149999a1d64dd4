"""Lower the parts of a staged program for the sizes of a step, each distinct ones once."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxdp.compiler.pass_manager import PassManager
from fxdp.compiler.staged_program import StagedProgram
from fxdp.ir import conversions
from fxdp.ir.draws import node_draws
from fxdp.ir.graphs import copy_graph
from fxdp.ir.level import Level
from fxdp.ir.model_tensors import slot_values
from fxdp.ir.notes import note
from fxdp.ir.sizes import evaluate
from fxdp.ir.slots import Size
from fxdp.ir.types import TensorType, local_shape
from fxdp.lowering import Halves, lower_eager, lower_inductor
from fxdp.lowering.inductor.start import start_of
from fxdp.lowering.shapes import Shapes, SizesFixedError
from fxdp.passes import EmitProgram
from fxdp.pipeline.cut import Part
from fxdp.pipeline.cut.partition import backward_gives, halves_of, summed
from fxdp.pipeline.schedule import Kind, Schedule
from fxdp.pipeline.write.events import RECORD, WAIT
from fxdp.ranks.joined import Joined
from fxdp.runtime.p2p import Receive, Send
from fxdp.runtime.stage_calls import Backward, Code, Forward, InputGradient, Once, Sums, WeightGradient
from fxdp.runtime.streams import RecordEvent, Streams, WaitEvent
from fxdp.runtime.template import Template

_log = logging.getLogger("fxdp")

_EXACT = 2
"""For how many distinct sizes a part is compiled before one program serves all others."""

_MOST_PARTS = 4096
"""The seeds of one rank's parts come this many before the next rank's: stages, then what ends their steps."""


@dataclass
class Lowering:
    """The lowered parts of one program, by part and sizes."""

    local: StagedProgram
    joined: Joined
    module: nn.Module
    halves: dict[Any, tuple[fx.GraphModule, Halves] | None] = field(default_factory=dict)
    distinct: dict[str, int] = field(default_factory=dict)

    def code(
        self, part: Part, name: str, sizes: Mapping[str, int], index: int | None, rows: Tensor | None,
        first: tuple[int, ...] | None = None,
    ) -> Code:  # fmt: skip
        """A part bound for one micro-batch's sizes, or the whole batch's.

        With `first`, its backward will only run in two: those of its results first.
        """
        rank, microbatches = self.local.mesh.rank, self.local.options.microbatches
        split = rank if index is None else rank * microbatches + index
        marks = any(n.target is conversions.partial for n in part.gm.graph.nodes)
        used = _sizes_used(part.gm)
        exact = tuple(sorted((key, value) for key, value in sizes.items() if key in used))
        kind = (name, rows is None, split == 0 or not marks)
        emitted = self.halves.get((*kind, exact))
        if emitted is None and self.distinct.get(name, 0) >= _EXACT:
            emitted = self._for_any_sizes(part, kind, sizes, split, index, first)
        if emitted is None:
            self.distinct[name] = self.distinct.get(name, 0) + 1
            emitted = self._lower(part, sizes, split, rows is None, False, index, first)
            self.halves[*kind, exact] = emitted
        gm, halves = emitted
        values = slot_values(gm.graph, self.module, self.local.captured.constants)
        seed = None
        if any(map(node_draws, part.gm.graph.nodes)):
            seed = rank * _MOST_PARTS + _number(name)
        return Code(halves, Template.of(gm, values).with_numbers(sizes, rows), seed)

    def _for_any_sizes(
        self,
        part: Part,
        kind: tuple[str, bool, bool],
        sizes: Mapping[str, int],
        split: int,
        index: int | None,
        first: tuple[int, ...] | None,
    ) -> tuple[fx.GraphModule, Halves] | None:
        """The part with its sizes as inputs; None where its ops fix them."""
        key = (*kind, "any")
        if key not in self.halves:
            self.distinct[kind[0]] += 1
            try:
                self.halves[key] = self._lower(part, sizes, split, kind[1], True, index, first)
            except SizesFixedError as error:
                _log.warning("%s fixes the sizes %s: it is compiled anew for each size", kind[0], error)
                self.halves[key] = None
        return self.halves[key]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        first = next(iter(self.module.parameters()), None)
        return first.device if first is not None else torch.device(self.local.mesh.device_type)

    def _lower(
        self, part: Part, sizes: Mapping[str, int], split: int, even: bool, generic: bool, index: int | None,
        first: tuple[int, ...] | None,
    ) -> tuple[fx.GraphModule, Halves]:  # fmt: skip
        mesh = self.local.mesh
        manager = PassManager(mesh, self.local.options.verify, level=Level.LOCAL)
        bound = None if generic else tuple(sizes.items())
        gm = manager.run(copy_graph(part.gm), [EmitProgram(bound, even, split)])
        if self.local.options.compute == "eager" or index is None:
            return gm, lower_eager(gm, frozenset(), summed(part))
        values = slot_values(gm.graph, self.module, self.local.captured.constants)
        single = mesh.size * self.local.options.microbatches == 1
        shapes = Shapes(dict(sizes), generic, single)
        halves = lower_inductor(gm, values, shapes, self.device, start_of(), frozenset(), summed(part), first)
        return gm, halves


def modules_of(
    lowering: Lowering,
    schedule: Schedule,
    sizes: Mapping[int | None, Mapping[str, int]],
    rows: Tensor | None,
    streams: Streams,
) -> dict[str, nn.Module]:
    """What a rank's program calls, by name: its stages, its ends of the transfers, its events."""
    local = lowering.local
    partition, mesh = local.partition, local.mesh
    modules: dict[str, nn.Module] = {}
    for stage, part in enumerate(partition.parts):
        if schedule.placement[stage] != mesh.pipeline.rank:
            continue
        kinds = {action.kind for row in schedule.ranks for action in row if action.stage == stage}
        first = None
        if Kind.INPUT_GRADIENT in kinds:
            urgent, _ = halves_of(partition, stage)
            first = tuple(i for i, name in enumerate(backward_gives(part)) if name in urgent)
        only_halves = first if Kind.BACKWARD not in kinds else None
        codes: dict[int | None, Code] = {
            index: lowering.code(part, f"stage {stage}", own, index, rows, only_halves)
            for index, own in sizes.items()
            if index is not None
        }
        modules |= _stage_modules(stage, part, codes, kinds, first)
        if part.summed:
            modules[f"sums_{stage}"] = _sums(lowering, part, sizes[None])
        last = partition.epilogues[stage]
        if last is not None:
            names = [c.name for c in last.reads]
            code = lowering.code(last, f"finish {stage}", sizes[None], None, rows)
            modules[f"finish_{stage}"] = Once(code, names, streams)
    if partition.prologue is not None:
        code = lowering.code(partition.prologue, "prologue", sizes[None], None, rows)
        modules["prologue"] = Once(code, (), streams)
    modules |= {RECORD: RecordEvent(streams), WAIT: WaitEvent(streams)}
    return modules | _transport_modules(lowering.joined, streams)


def _stage_modules(
    stage: int,
    part: Part,
    codes: dict[int | None, Code],
    kinds: Collection[Kind],
    first: tuple[int, ...] | None,
) -> dict[str, nn.Module]:
    ahead = [c.name for c in part.reads if not c.backward]
    behind = [c.name for c in part.reads if c.backward]
    made: dict[str, nn.Module] = {f"forward_{stage}": Forward(codes, ahead)}
    if Kind.BACKWARD in kinds:  # for some micro-batches; others may have it in two halves
        made[f"backward_{stage}"] = Backward(codes, behind)
    if first is None:
        return made
    for code in codes.values():
        code.halve(first)
    made[f"input_gradient_{stage}"] = InputGradient(codes, behind, len(first))
    made[f"weight_gradient_{stage}"] = WeightGradient()
    return made


def _sums(lowering: Lowering, part: Part, sizes: Mapping[str, int]) -> Sums:
    totals = [lowering.local.partition.totals[n] for n in backward_gives(part) if n in part.summed]
    types = [([evaluate(n, sizes) for n in local_shape(t.type, t.placement)], t.type.dtype) for t in totals]
    return Sums(types, lowering.device)


def _transport_modules(joined: Joined, streams: Streams) -> dict[str, nn.Module]:
    links, pipeline = joined.links, joined.mesh.pipeline
    if links is None or pipeline.size == 1:
        return {}
    device = torch.device(joined.mesh.device_type)
    ranks = [links.ranks[i] for i in pipeline.column]
    forward, backward = links.whole_group, links.backward_group
    assert forward is not None
    assert backward is not None
    return {
        "send_forward": Send(forward, ranks, streams),
        "receive_forward": Receive(forward, ranks, device, streams),
        "send_backward": Send(backward, ranks, streams),
        "receive_backward": Receive(backward, ranks, device, streams),
    }


def _sizes_used(gm: fx.GraphModule) -> frozenset[str]:
    """The sizes for which a part must be lowered anew."""
    names = set()
    for node in gm.graph.find_nodes(op="placeholder"):
        slot, type_, placement = note(node).slot, note(node).type, note(node).placement
        if isinstance(slot, Size) and node.users:
            names.add(slot.name)
        if isinstance(type_, TensorType) and not isinstance(placement, tuple):
            shape = local_shape(type_, placement)
            names |= {s.name for n in shape if not isinstance(n, int) for s in n.free_symbols}
    if any(n.target in conversions.CONVERSIONS for n in gm.graph.nodes):
        names |= {"B", "b", "offset", "b_max"}
    return frozenset(names)


def _number(name: str) -> int:
    """Of parts that draw random numbers, another one each: the prologue's is 0."""
    words = name.split()
    if len(words) == 1:
        return 0
    return int(words[1]) + 1 + (_MOST_PARTS // 2 if words[0] == "finish" else 0)
