"""The callables of the written step of one pipeline rank: stages, transfers and events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fxdp.compiler.emit import Lowered, WantedPart, device_of
from fxdp.compiler.program import Program
from fxdp.ir.graph.draws import graph_draws
from fxdp.ir.graph.model_tensors import local_of, signature_values
from fxdp.ir.graph.signature import InputSpec, Parameter
from fxdp.ir.types.sizes import evaluate
from fxdp.ir.types.value_types import local_shape
from fxdp.pipeline.cut.partition import Part, backward_gives, backward_parts
from fxdp.pipeline.schedule.action import Kind
from fxdp.pipeline.write.events import RECORD, WAIT
from fxdp.pipeline.write.microbatches import MicrobatchSizes
from fxdp.pipeline.write.stage_shards import ROWS, stage_sharded
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.runtime.p2p import Transport
from fxdp.runtime.stage_calls import (
    Code,
    StepModule,
    backward,
    forward,
    input_gradient,
    once,
    weight_gradient,
)
from fxdp.runtime.streams import Streams
from fxdp.runtime.template import CallFrame

_MOST_PARTS = 4096
"""Seeds per rank: each part of a rank has one, as many of each kind."""

_KINDS = ("stage", "round", "finish", "exchange")
"""The kinds of parts that may draw random numbers."""

_NOTHING: frozenset[int] = frozenset()


def wanted_parts(program: Program, layout: MicrobatchSizes, batches: tuple[int, ...]) -> list[WantedPart]:
    """Return the parts that this pipeline rank runs, for each micro-batch and once per step (index None)."""
    cut, rank = program.partition, program.mesh.rank
    sizes, own = layout.sizes, _own_stages(program)
    found = []
    for stage in () if cut.coupled else own:
        kinds, first = _kinds(program, stage, layout.count), _first_results(program, stage, layout.count)
        unhalved = first is None or Kind.BACKWARD in kinds
        found += [
            WantedPart(
                f"stage {stage}", cut.parts[stage], sizes[index], batches, layout.first + index, index, False,
                _NOTHING, first, unhalved,
            )
            for index in range(layout.count)
        ]  # fmt: skip
    here = {None, *own}
    found += [
        WantedPart(one.name, one.part, sizes[i], batches, layout.first + i, i, zero=_NOTHING)
        for each in cut.rounds
        for one in each.blocks
        if one.stage in here
        for i in range(layout.count)
    ]
    once = {f"finish {stage}": cut.epilogues[stage] for stage in own}
    once |= {f"gather {stage}": cut.gathers[stage] for stage in own if cut.gathers}
    once |= {one.name: one.part for each in cut.rounds for one in each.exchange if one.stage in here}
    for name, part in {**once, "prologue": cut.prologue}.items():
        if part is not None:
            found.append(WantedPart(name, part, sizes[None], batches, rank, once=True, zero=_NOTHING))
    return found


def step_modules(
    program: Program,
    process_mesh: ProcessMesh,
    module: nn.Module,
    parts: Sequence[tuple[WantedPart, Lowered]],
    layout: MicrobatchSizes,
    rows: Callable[[], Mapping[str, Tensor]],
    streams: Streams,
) -> dict[str, nn.Module]:
    """Return the callables of a step by name, made of lowered parts and the model's tensors.

    `rows` returns the row numbers of padded gathers.
    """
    cut, device = program.partition, device_of(module, program.mesh)
    sharded = stage_sharded(cut, program.mesh.sharding)
    codes: dict[str, dict[int | None, Code]] = {}
    for wanted, lowered in parts:
        codes.setdefault(wanted.name, {})[wanted.index] = _code(program, module, wanted, lowered, rows)
    made: dict[str, nn.Module] = {}
    for stage in () if cut.coupled else _own_stages(program):
        made |= _stage_modules(_kinds(program, stage, layout.count), stage, codes[f"stage {stage}"])
        if cut.parts[stage].summed:
            made[f"sums_{stage}"] = _sums(program, cut.parts[stage], layout.sizes[None], device)
    for name, code in codes.items():
        if name.startswith("round "):
            made[name.replace(" ", "_")] = forward(code)
        elif not name.startswith("stage "):
            made[name.replace(" ", "_")] = once(code[None], streams)
    if sharded:
        sharded_here = tuple(local_of(module.get_parameter(spec.name)) for spec in sharded)
        made[ROWS] = StepModule(lambda: sharded_here)
    made |= {RECORD: StepModule(streams.record), WAIT: StepModule(streams.wait)}
    return made | _transport_modules(process_mesh, streams, strided=program.options.block is not None)


def _own_stages(program: Program) -> list[int]:
    return [s for s in range(program.partition.stages) if program.placement[s] == program.mesh.pipeline.rank]


def _kinds(program: Program, stage: int, microbatches: int) -> set[Kind]:
    """Return the kinds of action that the schedule has for a stage."""
    ranks = program.run_schedule(microbatches).ranks
    return {action.kind for row in ranks for action in row if action.stage == stage}


def _first_results(program: Program, stage: int, microbatches: int) -> tuple[int, ...] | None:
    """Return the results that earlier stages await, if a stage's backward runs in two halves."""
    if Kind.INPUT_GRADIENT not in _kinds(program, stage, microbatches):
        return None
    urgent, _ = backward_parts(program.partition, stage)
    gives = backward_gives(program.partition.parts[stage])
    return tuple(i for i, name in enumerate(gives) if name in urgent)


def _code(
    program: Program, module: nn.Module, wanted: WantedPart, lowered: Lowered,
    rows: Callable[[], Mapping[str, Tensor]],
) -> Code:  # fmt: skip
    values: Mapping[InputSpec, Tensor] = signature_values(
        lowered.gm.graph, module, program.captured.constants
    )
    ahead = tuple(c.name for c in wanted.part.reads if not c.backward)
    behind = tuple(c.name for c in wanted.part.reads if c.backward)
    if wanted.part in program.partition.gathers and stage_sharded(program.partition, program.mesh.sharding):
        # needs shards of other pipeline ranks, which the step receives
        values = {spec: value for spec, value in values.items() if not isinstance(spec, Parameter)}
        ahead = tuple(spec.name for spec in wanted.part.parameters)
    template = CallFrame.of(lowered.gm, values, frozenset() if wanted.once else program.images)
    numbers = rows() if template.rows else {}
    seed = None
    if graph_draws(wanted.part.gm.graph):
        number, index = _number(wanted.name), wanted.index or 0
        if program.options.block is None or wanted.index is None:
            seed = program.mesh.rank * _MOST_PARTS + number, index
        else:  # a block draws what it draws on any rank, op by op also in any stage
            seed = number if program.options.fuses_blocks else 0, wanted.place
    template = template.with_numbers(wanted.sizes, numbers)
    # Inductor compiles for contiguous values
    by_block = program.options.block is not None and wanted.index is not None
    keeps_strides = by_block and not program.options.fuses_blocks
    return Code(lowered.pair, template, ahead, behind, seed, wanted.first or (), keeps_strides)


def _stage_modules(kinds: set[Kind], stage: int, codes: Mapping[int | None, Code]) -> dict[str, nn.Module]:
    made: dict[str, nn.Module] = {f"forward_{stage}": forward(codes)}
    if Kind.BACKWARD in kinds:  # for some micro-batches; for others the backward may run in two halves
        made[f"backward_{stage}"] = StepModule(backward)
    if Kind.INPUT_GRADIENT in kinds:
        made[f"input_gradient_{stage}"] = StepModule(input_gradient)
        made[f"weight_gradient_{stage}"] = StepModule(weight_gradient)
    return made


def _sums(program: Program, part: Part, sizes: Mapping[str, int], device: torch.device) -> StepModule:
    """Return a module that makes the zeroed buffers in which the micro-batches of a stage accumulate."""
    totals = [program.partition.totals[n] for n in backward_gives(part) if n in part.summed]
    types = [([evaluate(n, sizes) for n in local_shape(t.type, t.placement)], t.type.dtype) for t in totals]
    return StepModule(lambda: tuple(torch.zeros(s, dtype=dtype, device=device) for s, dtype in types))


def _transport_modules(process_mesh: ProcessMesh, streams: Streams, *, strided: bool) -> dict[str, nn.Module]:
    comms, pipeline = process_mesh.comms, process_mesh.mesh.pipeline
    if comms is None or pipeline.size == 1:
        return {}
    device = torch.device(process_mesh.mesh.device_type)
    ranks = [comms.ranks[i] for i in pipeline.column]
    groups = {"forward": comms.world_group, "backward": comms.find("backward")}
    made: dict[str, nn.Module] = {}
    for way, group in groups.items():
        assert group is not None
        transport = Transport(group, ranks, device, streams, strided)
        made[f"send_{way}"] = StepModule(transport.send)
        made[f"receive_{way}"] = StepModule(transport.receive)
    return made


def _number(name: str) -> int:
    """Return a different number for each part that draws random numbers; 0 for the prologue."""
    kind, _, number = name.partition(" ")
    number, _, turn = number.partition(" turn ")
    base = int(turn or 0) * _MOST_PARTS + _KINDS.index(kind) * _MOST_PARTS // len(_KINDS) if number else 0
    return base + int(number or -1) + 1
