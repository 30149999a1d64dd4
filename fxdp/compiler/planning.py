"""From a program to a `Plan` for people; rows of the plan are computed on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from fxdp.capture.input_axes import SAMPLES
from fxdp.compiler.block_costs import block_lines
from fxdp.compiler.program import Program
from fxdp.ir import redistributions
from fxdp.ir.axis_rows import AxisRow
from fxdp.ir.graph.metadata import meta, tensor_operands
from fxdp.ir.graph.parameter_buckets import parameter_of, unsharded_parameters
from fxdp.ir.graph.signature import Gradient, Parameter
from fxdp.ir.network.zero_copy_gathers import is_zero_copy
from fxdp.ir.types.mesh import REGATHER, Mesh
from fxdp.ir.types.sizes import Split, axes_in, axes_of, by_axis
from fxdp.ir.types.value_types import TensorType, type_bytes
from fxdp.pipeline.cut.cost import node_cost
from fxdp.pipeline.schedule.transfers import Edge
from fxdp.pipeline.write.microbatches import MicrobatchSizes
from fxdp.pipeline.write.step_graph import Sent, StepGraph
from fxdp.reports.coverage import coverage, replicated_ops
from fxdp.reports.explain import explain
from fxdp.reports.plan import Plan
from fxdp.reports.plan_data.collective import Collective
from fxdp.reports.plan_data.collective_rows import Reader, collectives_of, communication
from fxdp.reports.plan_data.details import Details
from fxdp.reports.plan_data.live_values import LiveValues, exchange_buffers
from fxdp.reports.plan_data.memory_curve import ADAM, RankMemory, curve, scheduled_curves
from fxdp.reports.plan_data.parameter_table import parameter_rows
from fxdp.reports.plan_data.sent_rows import Transfers
from fxdp.reports.rows import CommRow
from fxdp.reports.schedule_svg import DrawnSchedule
from fxdp.reports.stages import stage_rows


@dataclass(frozen=True)
class Planning:
    """Builder of the plan of a program at given sizes: all values that ranks reduce, gather and send.

    `sizes` has `B`, the program's further symbols, and optionally `b` of one rank; without `b` all data
    ranks have equally many samples.
    """

    program: Program
    sizes: Mapping[str, int]
    split: Sequence[int] = ()
    """The rows of each data rank in a call; empty for an example, of which each rank has as many rows."""

    def plan(self, device_mesh: DeviceMesh | None = None) -> Plan:
        """Return the plan; large tables are computed on first access."""
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
            None if scheduled is None else DrawnSchedule.of(program.drawn_schedule, edges),
            edges,
            () if scheduled is None else stage_rows(program.gm, partition, scheduled.schedule, sent),
            annotated=lambda: program.graph(sizes, device_mesh),
            details=cache(self._details),
        )

    @cached_property
    def _steps(self) -> list[StepGraph]:
        """The written program of each pipeline rank; empty for a program that is not cut."""
        if self.program.step is None:
            return []
        ranks = range(len(self.program.step.schedule.ranks))
        writers = [self.program.writer(self._layout, rank) for rank in ranks]
        for writer in writers:
            writer.write()
        return [writer.step for writer in writers]

    @cached_property
    def _sent(self) -> list[Sent]:
        """Values that pipeline ranks send to one another, shards of parameters first."""
        program = self.program
        apart = self._steps if program.gathers_apart else []
        before = [program.step_graph(self._layout, step.rank) for step in apart]
        for step in before:
            program.writer(self._layout, step.rank).write_gathers(step)
        return [item for step in (*before, *self._steps) for item in step.sent]

    @property
    def _layout(self) -> MicrobatchSizes:
        return self.program.layout(self._local)

    @property
    def _local(self) -> dict[str, int]:
        """The sizes on a rank, by default of equal local batches."""
        local: dict[str, int] = {}
        for axis in axes_of(self.sizes):
            total = self.sizes[axis.total.name]
            equal = total // self.program.mesh.size
            if block := self.program.options.block:
                equal = min(-(-equal // block) * block, total)
            local |= zip(axis.inputs[1:], (equal, 0, equal), strict=True)
        return {**local, **self.sizes}

    @cached_property
    def _collectives(self) -> tuple[Collective, ...]:
        """All reductions, gathers and transfers of all ranks in a step."""
        program, cut = self.program, self.program.partition
        reader = Reader(program.causes, self.sizes, program.captured.origin)
        named = [
            ("prologue", cut.prologue),
            *((one.name, one.part) for one in cut.in_rounds),
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
        """Return the name of a part in the plan's rows.

        For a program that is not cut, only a gather that does not run at each call has a name.
        """
        if self.program.step is not None:
            return name
        return "gather" if name.startswith("gather") else ""

    def _details(self) -> Details:
        program, mesh, origin = self.program, self.program.mesh, self.program.captured.origin
        return Details(
            program.captured.model,
            mesh.entire,
            self.sizes["B"],
            tuple(program.options.lines()),
            (*program.choice, *self._blocks()),
            program.captured.reasons(every=program.options.strict),
            self._collectives,
            parameter_rows(program.causes, mesh, origin, self._collectives, self._readers()),
            self.memory(),
            explain(program.causes, mesh.axes, origin),
            _axis_rows(program, self.split or self._even_split()),
        )

    def _even_split(self) -> Split:
        """Return the rows of all ranks where each has those of the example."""
        size, local = self.program.mesh.size, self._local
        own, *further = axes_of(self.sizes)
        return Split(
            (local[own.local.name],) * size, {one.name: (local[one.local.name],) * size for one in further}
        )

    def _blocks(self) -> tuple[str, ...]:
        """Return the predicted cost of blocks, as text; empty without `fxdp.Bitwise`."""
        block, device = self.program.options.block, self.program.mesh.device_type
        if block is None:
            return ()
        cut = self.program.partition
        parts = sum(len(one.blocks) for one in cut.rounds) if cut.coupled else 1
        return block_lines(self.program.causes.graph, device, self._local["b"], block, parts)

    def _readers(self) -> dict[str, tuple[int, ...]]:
        """Return the stages that read each parameter, by the parameter's name."""
        cut = self.program.partition
        if self.program.step is None:
            return {}
        found: dict[str, tuple[int, ...]] = {}
        for parts in (cut.parts, cut.gathers):
            for stage, part in enumerate(parts):
                for spec in part.parameters if part is not None else ():
                    found[spec.name] = (*found.get(spec.name, ()), stage)
        return found

    def largest(self) -> list[tuple[str, int]]:
        """Return the largest values in a rank's memory, with their bytes, largest first.

        A trained parameter counts with gradient and Adam's state; an activation counts if saved for the
        backward.
        """
        program, mesh = self.program, self.program.mesh
        holders = _holders(mesh)
        held = LiveValues(program.gm, holders, self._local)
        trained = {s.of for s in meta(program.gm.graph.output_node()).results if isinstance(s, Gradient)}
        rows = [
            (f"parameter {spec.name}", size * (2 + ADAM if spec in trained else 1))
            for spec, size in held.given().items() if isinstance(spec, Parameter)
        ]  # fmt: skip
        saved = [(_shown_value(node), held.bytes(node)) for node in held.saved_values()]
        return sorted([*rows, *saved], key=lambda row: -row[1])

    def memory(self) -> tuple[RankMemory, ...]:
        """Return the memory curve of each pipeline rank over a step."""
        program, mesh = self.program, self.program.mesh
        holders = _holders(mesh)
        parts = [part.gm for part in program.partition.parts]
        if program.step is None:
            shared, shown = exchange_buffers(parts, mesh), partial(is_zero_copy, mesh=mesh)
            gather = next((part.gm for part in program.partition.gathers if part is not None), None)
            return (curve(parts[0], holders, self._local, shared=shared, gather=gather, shown=shown),)
        layout = self._layout
        each = [layout.sizes[i] for i in range(layout.count)]
        gradients: list[dict[Parameter, int]] = [{} for _ in parts]
        types = {spec: type_ for part in program.parts for spec, type_ in part.parameters.items()}
        for spec, _, stage in program.partition.results:
            if isinstance(spec, Gradient) and isinstance(spec.of, Parameter):
                gradients[stage][spec.of] = type_bytes(types[spec.of], {})
        gathers = [None if part is None else part.gm for part in program.partition.gathers]
        owned = program.options.pipeline.gradients == "owner"
        schedule = program.schedule_of(layout.count)
        return scheduled_curves(parts, holders, each, schedule, gradients, gathers, owned=owned)


def _holders(mesh: Mesh) -> dict[str | None, int]:
    """Return the number of ranks over which parameters are sharded, by the axis of their placement."""
    return {axis: mesh.size_along(axis) * mesh.pipeline.size for axis in (None, *mesh.axes, REGATHER)}


def _shown_value(node: fx.Node) -> str:
    """Return a description of a value that is saved for the backward."""
    if node.target is redistributions.wait and node.args[0].target is redistributions.all_gather_shards:  # type: ignore[union-attr]
        names = [parameter_of(rows).name for rows, _ in unsharded_parameters(node.args[0])]  # type: ignore[arg-type]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"{names[0]}{more}, gathered"
    return f"%{node.name} at {meta(node).location}"


def _in_short(row: Collective) -> CommRow:
    return CommRow(
        row.kind, row.bytes, row.count, row.text, str(row.location), row.phase, row.gradient, row.transport
    )


def _axis_rows(program: Program, split: Sequence[int]) -> tuple[AxisRow, ...]:
    """Return the rows of each rank along the axes of a call, with each axis' share of the work.

    An op works for the axes of what it reads and writes, in equal parts; all axes count equally many rows.
    """
    axes = program.captured.axes
    if not axes.names:
        return (AxisRow.of(SAMPLES, split, 1.0),)
    names = {name: rows.axis for name, rows in zip(axes.names, axes.rows, strict=True) if rows is not None}
    work = dict.fromkeys(by_axis(split), 0.0)
    for node in program.causes.graph.nodes:
        found = sorted(_axes(node) & work.keys())
        for name in found:
            work[name] += node_cost(node) / len(found)
    total = sum(work.values()) or 1.0
    return tuple(AxisRow.of(names[name], sizes, work[name] / total) for name, sizes in by_axis(split).items())


def _axes(node: fx.Node) -> set[str]:
    types = (meta(one).type for one in (node, *tensor_operands(node)))
    return {
        name
        for type_ in types
        if isinstance(type_, TensorType)
        for size in type_.shape
        for name in axes_in(size)
    }
