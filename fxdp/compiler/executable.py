"""Executables of a program for the sizes of a call: a single part bound to the model, or a written step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from fxdp.compiler.deterministic_kernels import unknown_kernels
from fxdp.compiler.emit import FULL, Lowered, WantedPart
from fxdp.compiler.lowered_parts import LoweredParts
from fxdp.compiler.message_names import message_names
from fxdp.compiler.program import Program
from fxdp.compiler.repeated_step import RepeatedStep
from fxdp.compiler.step_modules import step_modules, wanted_parts
from fxdp.ir.graph.draws import drawn_seed, graph_draws
from fxdp.ir.graph.gradient_rows import sparse_gradients
from fxdp.ir.graph.graphs import inputs_of
from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.graph.model_tensors import signature_values
from fxdp.ir.graph.outputs_behind import outputs_behind
from fxdp.ir.graph.parameter_buckets import gather_starts, parameter_of, unsharded_parameters
from fxdp.ir.graph.signature import Buffer, Mutation, Parameter
from fxdp.ir.types.even_batches import check_borders
from fxdp.ir.types.sizes import Split, samples_of
from fxdp.lowering.eager import forward_inputs
from fxdp.pipeline.cut.partition import Part, Partition
from fxdp.ranks.agreement import Agreement
from fxdp.ranks.liveness.failure import guard
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.ranks.same_order import exchange_in_backward
from fxdp.runtime.bound import BoundProgram
from fxdp.runtime.p2p import Microbatch
from fxdp.runtime.ranges import Names
from fxdp.runtime.step import Step
from fxdp.runtime.streams import Streams
from fxdp.runtime.template import CallFrame
from fxdp.runtime.undefined_gradients import UndefinedGradients
from fxdp.runtime.unsharded_parameters import Gathered, Key, UnshardedParameters

Runs: TypeAlias = "BoundProgram | Step"
"""Callable for one call; a `Step` includes its backward, while autograd starts that of a `BoundProgram`."""


@dataclass(frozen=True, eq=False)
class _Executable:
    """Code that runs calls of certain sizes, or of any size."""

    runs: Runs
    graph: fx.GraphModule
    """This rank's emitted program."""


class CompiledVariants:
    """The executables of one program: parts are lowered on demand, each for the sizes of a call."""

    def __init__(
        self,
        program: Program,
        process_mesh: ProcessMesh,
        module: nn.Module,
        streams: Streams,
        full: UnshardedParameters,
    ) -> None:
        self.program = program
        self.made = 0
        """Number of executables made so far."""
        self._process_mesh = process_mesh
        self._module = module
        self._parts = LoweredParts(program, process_mesh, module)
        self._bound: WeakKeyDictionary[Lowered, _Executable] = WeakKeyDictionary()
        self._streams, self._unsharded_parameters = streams, full

    @property
    def any_size(self) -> bool:
        """True if there is an executable for any size."""
        return self._parts.any_size()

    def make(
        self,
        sizes: Mapping[str, int],
        batches: tuple[int, ...],
        rows: Callable[[], Mapping[str, Tensor]],
        *,
        generic: bool,
    ) -> _Executable:
        """Return the executable for a call of these sizes; all ranks call this together.

        `sizes` has `B`, `b`, `offset`, `b_max` of this rank and the program's further symbols; `rows`
        returns the row numbers of padded gathers. With `generic` the executable serves further sizes as
        well, if possible.

        Raises
        ------
        AgreementError : ranks would start collectives in different orders.
        """
        if self.program.step is None:
            return self._full(sizes, batches, generic)
        return self._step(sizes, batches, rows, generic)

    def _full(self, sizes: Mapping[str, int], batches: tuple[int, ...], generic: bool) -> _Executable:
        (part,) = self.program.partition.parts
        wanted = WantedPart(FULL, part, sizes, batches, self.program.mesh.rank)
        lowered, *gather = self._parts.lower([wanted, *self._gather()], generic=generic)
        found = self._bound.get(lowered)
        if found is None:
            self.made += 1
            bound = self._bind(lowered)
            if gather:
                bound.full = self._gathered(gather[0])
            found = self._bound[lowered] = _Executable(bound, lowered.gm)
        return found

    def _gather(self) -> list[WantedPart]:
        """Return the part that gathers parameters after a change of their shards; the part reads no sizes."""
        gathers = [part for part in self.program.partition.gathers if part is not None]
        rank = self.program.mesh.rank
        return [WantedPart("gather", part, {}, (), rank, once=True, zero=frozenset()) for part in gathers]

    def _gathered(self, lowered: Lowered) -> Callable[[], Mapping[str, Tensor]]:
        """Return a function for a call's unsharded parameters, which gathers only if shards have changed."""
        own = _gathered_keys(self.program.partition, [0], 0)
        template = CallFrame.of(lowered.gm, signature_values(lowered.gm.graph, self._module, {}))
        return lambda: self._unsharded_parameters.of(own, lambda: lowered.pair.forward(template.filled(())))

    def _bind(self, lowered: Lowered) -> BoundProgram:
        program, gm = self.program, lowered.gm
        mesh, options = program.mesh, program.options
        values = signature_values(gm.graph, self._module, program.captured.constants)
        seeded = mesh.size > 1 and not options.single_device_rng and graph_draws(gm.graph)
        bound = BoundProgram.bind(gm, lowered.pair, values, world=mesh.size, rank=mesh.rank, seeded=seeded)
        bound.sharded = self._sharded(gm)
        (part,) = program.partition.parts
        bound.messages = message_names(part.gm.graph, gm.graph, mesh)
        bound.guarded = lambda call: guard(self._process_mesh, call)
        comms = self._process_mesh.comms
        if comms is not None:
            bound.settled = comms.transport.settle
        behind = outputs_behind(program.causes.graph)
        specs = [meta(n).spec for n in forward_inputs(gm.graph)]
        tables = sparse_gradients(program.captured.gm.graph)
        sizes = ((i, self._module.get_parameter(s.name).shape) for i, s in enumerate(specs) if s in tables)
        bound.sparse = tuple(sizes)
        places = [(place, behind[spec]) for place, spec in enumerate(specs) if spec in behind]
        bound.apart = tuple(place for place, spec in enumerate(specs) if spec not in behind)
        bound.undefined_gradients = UndefinedGradients(bound.tangents, places)
        # where no parameter is trained, ranks may run different backwards
        if comms is not None and any(isinstance(of, Parameter) for of in behind):
            bound.moment = lambda: comms.sequence_log.now
            bound.undefined_gradients.exchange = partial(exchange_in_backward, self._process_mesh)
            bound.undefined_gradients.meta = comms.sequence_log.leave_out
        return bound

    def _sharded(self, gm: fx.GraphModule) -> tuple[tuple[int, DTensor], ...]:
        """Return the sharded parameters among the forward's inputs, with their positions."""
        found = []
        for position, node in enumerate(forward_inputs(gm.graph)):
            spec = meta(node).spec
            parameter: Any = self._module.get_parameter(spec.name) if isinstance(spec, Parameter) else None
            if isinstance(parameter, DTensor):
                found.append((position, parameter))
        return tuple(found)

    def _step(
        self, sizes: Mapping[str, int], batches: tuple[int, ...],
        rows: Callable[[], Mapping[str, Tensor]], generic: bool,
    ) -> _Executable:  # fmt: skip
        program = self.program
        if program.options.block is not None:
            check_borders(samples_of(batches), program.options.block)
            # one code for all blocks: Inductor's for any size may be fused in another way, and what a block
            # of a ragged batch is made of says nothing about the next one
            generic = isinstance(batches, Split)
        layout = program.layout(sizes, batches)
        rank = program.mesh.pipeline.rank
        writer = program.writer(layout, rank)
        graph = writer.write()
        wanted = wanted_parts(program, layout, batches)
        lowered = self._parts.lower(wanted, generic=generic)
        parts = list(zip(wanted, lowered, strict=True))
        modules = step_modules(program, self._process_mesh, self._module, parts, layout, rows, self._streams)
        gm = fx.GraphModule({**modules}, graph, "Step")
        self.made += 1
        bound = self._bind_step(gm, self._messages(parts))
        if program.gathers_apart:
            before = writer.write_gathers(program.step_graph(layout, rank))
            bound.full = self._gathered_step(fx.GraphModule({**modules}, before, "Gather"))
        return _Executable(bound, gm)

    def _gathered_step(self, gm: fx.GraphModule) -> Callable[[Microbatch], Sequence[Tensor]]:
        """Return a function for the unsharded parameters of this pipeline rank's step."""
        program = self.program
        rank, placement = program.mesh.pipeline.rank, program.placement
        own = _gathered_keys(program.partition, placement, rank)
        return lambda batch: [*self._unsharded_parameters.of(own, lambda: gm(batch)).values()]

    def _messages(self, parts: Sequence[tuple[WantedPart, Lowered]]) -> dict[str, Names]:
        """Return the collectives that each module of a written step starts.

        The halves of a backward have no lists of their own.
        """
        found: dict[str, Names] = {}
        for name, (wanted, lowered) in {wanted.name: (wanted, code) for wanted, code in parts}.items():
            pair = message_names(wanted.part.gm.graph, lowered.gm.graph, self.program.mesh)
            kind, _, stage = name.partition(" ")
            if kind == "stage":
                found |= zip((f"forward_{stage}", f"backward_{stage}"), pair, strict=True)
            else:
                found[name.replace(" ", "_")] = pair[0]
        return found

    def _bind_step(self, gm: fx.GraphModule, messages: Mapping[str, Names]) -> Step:
        program, step = self.program, self.program.scheduled()
        results = tuple(spec for spec, _, _ in program.partition.results)
        parameters = [spec for spec, _ in inputs_of(program.gm.graph, Parameter)]
        buffers = [s.of for s in results if isinstance(s, Mutation) and isinstance(s.of, Buffer)]
        bound = Step(
            gm,
            results,
            {s: self._module.get_parameter(s.name) for s in parameters},
            {s: self._module.get_buffer(s.name) for s in buffers},
            step.loss,
            step.not_differentiated,
            self._seed(),
            messages=messages,
            tables={
                spec: self._module.get_parameter(spec.name).shape
                for spec in sparse_gradients(program.captured.gm.graph)
            },
        )
        block, unknown = program.options.block, unknown_kernels(program.gm.graph)
        if block is not None and unknown:
            bound.repeated = RepeatedStep(block, unknown, self._process_mesh).check
        comms = self._process_mesh.comms
        if comms is not None:
            bound.settled = comms.transport.settle
            bound.moment, bound.handed_out = lambda: comms.sequence_log.now, comms.sequence_log.begin_backward
        return bound

    def _seed(self) -> Callable[[], int]:
        """Return the function that draws a call's seed; stages that share random numbers share the seed."""
        program, mesh = self.program, self.program.mesh
        partition = program.partition
        shared = (one.part for one in partition.in_rounds if one.stage is None)
        early = [*shared, *filter(None, (partition.prologue,))]
        if mesh.pipeline.size > 1 and any(graph_draws(part.gm.graph) for part in early):
            return lambda: Agreement(self._process_mesh).exchange((drawn_seed(),))[0][0]
        return drawn_seed if graph_draws(program.gm.graph) else int


def _gathered_keys(partition: Partition, placement: Sequence[int], rank: int) -> Gathered:
    """Return the keys that all pipeline ranks gather, and those of `rank`; `placement[stage]` is a rank."""
    places, own = set(), dict[str, Key]()
    for part, home in zip(partition.gathers, placement, strict=True):
        keys = {} if part is None else _keys(part)
        places |= {(home, *key) for key in keys.values()}
        own |= keys if home == rank else {}
    return Gathered(frozenset(places), own)


def _keys(part: Part) -> dict[str, Key]:
    """Return parameter and dtype of each value that a part gives, by the value's name, in order."""
    graph = part.gm.graph
    pairs = [pair for start in gather_starts(graph, backward=False) for pair in unsharded_parameters(start)]
    read = {full: (parameter_of(rows).name, tensor_type(full).dtype) for rows, full in pairs}
    values: tuple[fx.Node, ...] = graph.output_node().args[0]  # type: ignore[assignment]
    return {name: read[value] for name, value in zip(part.gives, values, strict=True)}
