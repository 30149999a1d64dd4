"""From a program to what a person reads of it: a `Plan`, its rows made when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from fxdp.compiler.program import Program
from fxdp.ir import conversions
from fxdp.ir.mesh import REGATHER, Mesh
from fxdp.ir.notes import note
from fxdp.ir.row_buckets import parameter_of, whole_values
from fxdp.ir.shown_rows import is_shown
from fxdp.ir.slots import Gradient, Parameter
from fxdp.ir.types import type_bytes
from fxdp.pipeline.schedule.transfers import Edge
from fxdp.pipeline.write.microbatches import MicrobatchSizes
from fxdp.pipeline.write.step_graph import Sent, StepGraph
from fxdp.reports.coverage import coverage
from fxdp.reports.explain import explain
from fxdp.reports.plan import Plan, replicated_ops
from fxdp.reports.plan_data.collective import Collective
from fxdp.reports.plan_data.collective_rows import Reader, collectives_of, communication
from fxdp.reports.plan_data.details import Details
from fxdp.reports.plan_data.held_values import HeldValues, exchange_buffers
from fxdp.reports.plan_data.memory_curve import ADAM, RankMemory, curve, scheduled_curves
from fxdp.reports.plan_data.parameter_table import parameter_rows
from fxdp.reports.plan_data.sent_rows import Transfers
from fxdp.reports.rows import CommRow
from fxdp.reports.schedule_svg import DrawnSchedule
from fxdp.reports.stages import stage_rows


@dataclass(frozen=True)
class Planning:
    """Makes the plan of a program at the given sizes: what ranks reduce, gather and send.

    `sizes` are `B`, further symbols, and `b` of the rank's whole batch: without it all data ranks have
    equally many samples.
    """

    program: Program
    sizes: Mapping[str, int]

    def plan(self, device_mesh: DeviceMesh | None = None) -> Plan:
        """The plan; what is large is made when somebody asks."""
        program, sizes, origin = self.program, self.sizes, self.program.captured.origin
        scheduled, partition = program.step, program.partition
        sent = self._sent
        cut = partition.edges if scheduled else ()
        edges = tuple(Edge(e.name, e.source, e.target, e.backward, e.once) for e in cut)
        return Plan(
            program.text,
            tuple(map(_in_short, self._collectives)),
            communication(program.causes, sizes, origin),
            replicated_ops(program.gm),
            dict(program.seconds),
            program.nodes,
            coverage(program.causes, sizes, origin),
            None if scheduled is None else DrawnSchedule.of(scheduled.schedule, edges),
            edges,
            () if scheduled is None else stage_rows(program.gm, partition, scheduled.schedule, sent),
            annotated=lambda: program.graph(sizes, device_mesh),
            details=cache(self._details),
        )

    @cached_property
    def _steps(self) -> list[StepGraph]:
        """The written program of each pipeline rank; none of a program that stays whole."""
        if self.program.step is None:
            return []
        ranks = range(len(self.program.step.schedule.ranks))
        writers = [self.program.writer(self._layout, rank) for rank in ranks]
        for writer in writers:
            writer.write()
        return [writer.step for writer in writers]

    @cached_property
    def _sent(self) -> list[Sent]:
        """What pipeline ranks send one another, the rows of parameters first."""
        program = self.program
        apart = self._steps if program.gathers_apart else []
        before = [program.step_graph(self._layout, step.rank) for step in apart]
        for step in before:
            program.writer(self._layout, step.rank).write_gathers(step)
        return [item for step in (*before, *self._steps) for item in step.sent]

    @property
    def _layout(self) -> MicrobatchSizes:
        return MicrobatchSizes.of(self._local, self.program.options.microbatches)

    @property
    def _local(self) -> dict[str, int]:
        """The sizes on a rank, of equal parts if they do not say."""
        equal = self.sizes["B"] // self.program.mesh.size
        return {"b": equal, "offset": 0, "b_max": equal, **self.sizes}

    @cached_property
    def _collectives(self) -> tuple[Collective, ...]:
        """What all ranks reduce, gather and send in a step."""
        program, cut = self.program, self.program.partition
        reader = Reader(program.causes, self.sizes, program.captured.origin)
        named = [
            ("prologue", cut.prologue),
            *((f"gather {i}", part) for i, part in enumerate(cut.gathers)),
            *((f"stage {i}", part) for i, part in enumerate(cut.parts)),
            *((f"finish {i}", part) for i, part in enumerate(cut.epilogues)),
        ]
        rows = [
            row
            for name, part in named
            if part is not None
            for row in collectives_of(part.gm, reader, program.mesh, self._shown(name))
        ]
        transfers = Transfers(cut, reader, [step.graph for step in self._steps], program.mesh.backend)
        return (*rows, *transfers.rows(self._sent))

    def _shown(self, name: str) -> str:
        """The name of a part in rows: of a program that stays whole, of what it does not do at each call."""
        if self.program.step is not None:
            return name
        return "gather" if name.startswith("gather") else ""

    def _details(self) -> Details:
        program, mesh, origin = self.program, self.program.mesh, self.program.captured.origin
        pipeline = mesh.pipeline.size
        return Details(
            program.captured.model,
            {**({"pp": pipeline} if pipeline > 1 else {}), **mesh.shape},
            self.sizes["B"],
            tuple(program.options.lines()),
            program.choice,
            self._collectives,
            parameter_rows(program.causes, mesh, origin, self._collectives, self._readers()),
            self.memory(),
            explain(program.causes, mesh.axes, origin),
        )

    def _readers(self) -> dict[str, tuple[int, ...]]:
        """The stages that read each parameter."""
        cut = self.program.partition
        if self.program.step is None:
            return {}
        found: dict[str, tuple[int, ...]] = {}
        for parts in (cut.parts, cut.gathers):
            for stage, part in enumerate(parts):
                for slot in part.parameters if part is not None else ():
                    found[slot.name] = (*found.get(slot.name, ()), stage)
        return found

    def largest(self) -> list[tuple[str, int]]:
        """What takes the most of a rank's memory: parameters with gradients and Adam's state, activations."""
        program, mesh = self.program, self.program.mesh
        holders = _holders(mesh)
        held = HeldValues(program.gm, holders, self._local)
        trained = {s.of for s in note(program.gm.graph.output_node()).results if isinstance(s, Gradient)}
        rows = [
            (f"parameter {slot.name}", size * (2 + ADAM if slot in trained else 1))
            for slot, size in held.given().items() if isinstance(slot, Parameter)
        ]  # fmt: skip
        saved = [(_shown_value(node), held.bytes(node)) for node in held.saved_values()]
        return sorted([*rows, *saved], key=lambda row: -row[1])

    def memory(self) -> tuple[RankMemory, ...]:
        """What each pipeline rank holds over a step."""
        program, mesh = self.program, self.program.mesh
        holders = _holders(mesh)
        parts = [part.gm for part in program.partition.parts]
        if program.step is None:
            shared, shown = exchange_buffers(parts, mesh), partial(is_shown, mesh=mesh)
            gather = next((part.gm for part in program.partition.gathers if part is not None), None)
            return (curve(parts[0], holders, self._local, shared=shared, gather=gather, shown=shown),)
        each = [self._layout.sizes[i] for i in range(program.options.microbatches)]
        gradients: list[dict[Parameter, int]] = [{} for _ in parts]
        types = {slot: type_ for part in program.parts for slot, type_ in part.parameters.items()}
        for slot, _, stage in program.partition.results:
            if isinstance(slot, Gradient) and isinstance(slot.of, Parameter):
                gradients[stage][slot.of] = type_bytes(types[slot.of], {})
        gathers = [None if part is None else part.gm for part in program.partition.gathers]
        owned = program.options.gradients == "owner"
        schedule = program.step.schedule
        return scheduled_curves(parts, holders, each, schedule, gradients, gathers, owned=owned)


def _holders(mesh: Mesh) -> dict[str | None, int]:
    """Over how many ranks rows are dealt out, by the axis of their placement."""
    return {axis: mesh.size_along(axis) * mesh.pipeline.size for axis in (None, *mesh.axes, REGATHER)}


def _shown_value(node: fx.Node) -> str:
    """A value that stays for the backward, in words."""
    if node.target is conversions.wait and node.args[0].target is conversions.gather_rows:  # type: ignore[union-attr]
        names = [parameter_of(rows).name for rows, _ in whole_values(node.args[0])]  # type: ignore[arg-type]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"{names[0]}{more}, gathered"
    return f"%{node.name} at {note(node).site}"


def _in_short(row: Collective) -> CommRow:
    return CommRow(
        row.kind, row.bytes, row.count, row.text, str(row.site), row.phase, row.gradient, row.carrier
    )
