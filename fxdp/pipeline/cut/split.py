"""Cut a program into parts, each with a graph, and list the values that pass between parts.

`split` cuts a staged program. `split_gathers` separates the all-gathers of parameters from a program that
is not cut: they run only when shards have changed, and not at each call.

    gather   %all_gather_shards = all_gather_shards([%w, %b], (20, 5), ())    reads shards, gives full values
    program  %mm = aten.mm(%x, %w_full)                                       takes these like its inputs
"""

from __future__ import annotations

from itertools import filterfalse

from torch import fx

from fxdp.errors import StageError
from fxdp.ir.graph.graphs import inputs_of, results_of
from fxdp.ir.graph.metadata import copy_meta, meta, placed_tensor, tensor_type
from fxdp.ir.graph.parameter_buckets import gather_starts, unsharded_parameters
from fxdp.ir.graph.signature import Gradient, OutputSpec, StageValue, Tangent
from fxdp.ir.types.born_axes import is_born, read_from_rows
from fxdp.ir.types.placements import R, Shard
from fxdp.ir.types.sizes import axis_of
from fxdp.ir.types.value_types import ScalarType, TensorType
from fxdp.pipeline.cut.node_roles import is_cheap_view, is_number, same_in_all
from fxdp.pipeline.cut.part_builder import PartBuilder
from fxdp.pipeline.cut.partition import CutEdge, Part, Partition, Total
from fxdp.pipeline.cut.phases import Phases
from fxdp.pipeline.cut.round_parts import RoundParts
from fxdp.torch_compat import aten


class _Cut:
    """The cut of one program."""

    def __init__(self, gm: fx.GraphModule, phases: Phases, stages: int) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.phases = phases
        self.stages = stages
        self.gathered = set(phases.gathered)
        self.early = {*phases.prologue, *self.gathered, *filterfalse(is_number, phases.rounds.once)}
        self.order = {n: i for i, n in enumerate(self.graph.nodes)}
        self.results = results_of(self.graph)

    def run(self) -> Partition:
        epilogue_members = set(self.phases.epilogue)
        # results that belong to no stage are computed in the first epilogue
        loose = {n for _, n in self.results if self._is_loose(n)}
        last = [self._epilogue(s, epilogue_members, loose) for s in range(self.stages)]
        read_late = [*(n for builder, _ in last for n in builder.crossing), *(n for _, n in self.results)]
        own = [n for n in read_late if self.phases.is_own(n)]
        wanted = {StageValue(n.name, n in self.phases.backward): n for n in own}
        builders = [self._stage(s) for s in range(self.stages)]
        parts = [self._finish_stage(s, builders, wanted) for s in range(self.stages)]
        returned = {n for _, n in self.results}
        read = [{*e.crossing, *returned} for e, _ in last]
        coupled = bool(self.phases.rounds.coupled)
        if not coupled:  # or rounds run what would be stages
            read = [{*b.crossing, *late} for b, late in zip(builders, read, strict=True)]
        rounds = RoundParts(self.gm, self.phases, self.stages, {*own}.union(*read))
        built = rounds.build()
        for stage in range(self.stages):
            read[stage] |= rounds.crossing.get(stage, set())
        gathers = [self._before(r & self.gathered, f"Gather{s}") for s, r in enumerate(read)]
        totals = wanted | {StageValue(n.name): n for n in rounds.exchanged}
        prologue = set().union(*read) & set(self.phases.prologue)
        for node in totals.values():
            _refuse_rows_out_of_order(node)
        return Partition(
            self.stages,
            self._before(prologue, "Prologue"),
            tuple(parts),
            tuple(self._finish_epilogue(b, m, last) for b, m in last),
            tuple(self._edges(builders)),
            {c.name: Total(n.name, self._home(n), c.backward, *placed_tensor(n)) for c, n in totals.items()},
            tuple((spec, n.name, self._home(n)) for spec, n in self.results),
            tuple(gathers) if self.gathered else (),
            built,
            coupled,
        )

    def _is_loose(self, node: fx.Node) -> bool:
        if node in self.early or node in self.phases.epilogue:
            return False
        return node.op == "placeholder" or not self.phases.is_own(node)

    def _home(self, node: fx.Node) -> int:
        return meta(node).stage or 0

    # ---- the micro-batch's parts -------------------------------------------------------------------------

    def _stage(self, stage: int) -> PartBuilder:
        roots = [n for n in self.graph.nodes if self.phases.is_own(n) and meta(n).stage == stage]
        members = set(roots)
        builder = PartBuilder(self.gm)
        backward = self.phases.backward

        def crossing(node: fx.Node) -> StageValue | None:
            if node in members:
                return None
            if node in self.early:
                return StageValue(node.name)
            if not self.phases.is_own(node) or is_cheap_view(node):
                return None
            # a forward value of a later stage can be needed only by this stage's backward
            later = node in backward or (meta(node).stage or 0) > stage
            return StageValue(node.name, later)

        builder.include(roots, crossing)
        return builder

    def _finish_stage(
        self, stage: int, builders: list[PartBuilder], wanted: dict[StageValue, fx.Node]
    ) -> Part:
        gives: dict[StageValue, fx.Node] = {}
        for builder in builders:
            for node, spec in builder.crossing.items():
                if self._is_of(node, stage):
                    gives[spec] = node
        for spec, node in wanted.items():
            if self._is_of(node, stage):
                gives[spec] = node
        chosen = sorted(gives.items(), key=lambda item: (item[0].backward, self.order[item[1]]))
        results: list[tuple[OutputSpec, fx.Node]] = list(chosen)
        builder = builders[stage]
        gm = builder.build(results, f"Stage{stage}")
        reads = tuple(builder.crossing[n] for n in builder.reads())
        return Part(gm, reads, tuple(spec.name for spec, _ in chosen))

    def _is_of(self, node: fx.Node, stage: int) -> bool:
        """Return whether a stage, and not something before the stages, computes a value."""
        return meta(node).stage == stage and node not in self.early

    def _edges(self, builders: list[PartBuilder]) -> list[CutEdge]:
        same = same_in_all(self.graph)
        found = []
        for target, builder in enumerate(builders):
            for node in builder.reads():
                if node in self.early:
                    continue
                _refuse_size_of_data(node, target)
                (type_, placement), source = placed_tensor(node), meta(node).stage
                assert source is not None
                backward, location = builder.crossing[node].backward, meta(node).location
                once = node in same and not backward
                edge = CutEdge(
                    node.name, source, target, backward, once,
                    type=type_, placement=placement, location=location, skip=meta(node).skip or "",
                )  # fmt: skip
                found.append(edge)
        return sorted(found, key=lambda e: (e.backward, e.source, e.target))

    # ---- what runs once per step -------------------------------------------------------------------------

    def _before(self, needed: set[fx.Node], title: str) -> Part | None:
        """Return the part that computes values before the first micro-batch, if need be."""
        if not needed:
            return None
        roots = sorted(needed, key=self.order.__getitem__)
        builder = PartBuilder(self.gm)
        builder.include(roots, lambda _: None)
        results: list[tuple[OutputSpec, fx.Node]] = [(StageValue(n.name), n) for n in roots]
        return Part(builder.build(results, title), (), tuple(n.name for n in roots))

    def _epilogue(
        self, stage: int, members: set[fx.Node], loose: set[fx.Node]
    ) -> tuple[PartBuilder, list[fx.Node]]:
        own = {n for n in members if meta(n).stage == stage}
        builder = PartBuilder(self.gm)

        def crossing(node: fx.Node) -> StageValue | None:
            if node in own:
                return None
            if node in self.early or node in members or self.phases.is_own(node):
                return StageValue(node.name)
            return None

        roots = [n for n in self.graph.nodes if n in own or (stage == 0 and n in loose)]
        builder.include(roots, crossing)
        return builder, roots

    def _finish_epilogue(
        self, builder: PartBuilder, roots: list[fx.Node], last: list[tuple[PartBuilder, list[fx.Node]]]
    ) -> Part | None:
        if not roots:
            return None
        read = {n for other, _ in last if other is not builder for n in other.crossing}
        specs: dict[fx.Node, list[OutputSpec]] = {}
        for spec, node in self.results:
            specs.setdefault(node, []).append(spec)
        given: list[tuple[OutputSpec, fx.Node]] = []
        for node in roots:
            if node in read or not all(isinstance(spec, Gradient) for spec in specs.get(node, ())):
                given.append((StageValue(node.name), node))
            elif node in specs:
                given.append((specs[node][0], node))
        gm = builder.build(given, "Epilogue")
        _make_tangents(gm.graph)
        reads = tuple(builder.crossing[n] for n in builder.reads())
        return Part(gm, reads, tuple(n.name for _, n in given))


def _refuse_size_of_data(node: fx.Node, target: int) -> None:
    """Raise if data decide how many rows a value has: the receiver of a transfer must know its shape."""
    known = meta(node)
    sizes = known.type.shape if isinstance(known.type, TensorType) else (getattr(known.type, "expr", 0),)
    symbols = [symbol for size in sizes if not isinstance(size, int) for symbol in size.free_symbols]
    if any(map(read_from_rows, symbols)):
        raise StageError(
            f"at {known.location}: data decide how many rows a value has that goes from stage {known.stage} "
            f"to stage {target}, which must know its shape in advance; let a stage begin in front of the op "
            "that selects the rows, or behind the last op that reads these"
        )


def _refuse_rows_out_of_order(node: fx.Node) -> None:
    """Raise if the rows of micro-batches are not those of the rank, one micro-batch after the other."""
    type_, placement, location = meta(node).type, meta(node).placement, meta(node).location
    along = None
    if isinstance(type_, TensorType) and isinstance(placement, Shard):
        along = axis_of(type_.shape[placement.dim])
        if along is None or not is_born(along) or (along.is_contiguous and placement.outer == 1):
            return
    if along is not None or isinstance(type_, ScalarType):
        raise StageError(
            f"at {location}: the step reads rows, or their number, that data select in each micro-batch: "
            f"%{node.name}. Return what is computed from these rows, or use fxdp.Pipeline(microbatches=1)"
        )


def _make_tangents(graph: fx.Graph) -> None:
    """Replace the loss's tangent by ones: no backward calls an epilogue with a tangent."""
    for _, node in inputs_of(graph, Tangent):
        # on the device of a value that the same op reads
        first = next(n for n in graph.nodes if node in n.all_input_nodes)
        beside = next(n for n in first.all_input_nodes if n is not node and meta(n).placement == R)
        with graph.inserting_before(first):
            one = graph.call_function(aten.new_ones.default, (beside, []), {"dtype": tensor_type(node).dtype})
        copy_meta(node, one, spec=None, operands=(R,))
        node.replace_all_uses_with(one)
        graph.erase_node(node)


def split(gm: fx.GraphModule, phases: Phases, stages: int) -> Partition:
    """Return the parts of a program whose nodes have stages (see `cut.assign`)."""
    return _Cut(gm, phases, stages).run()


def split_gathers(gm: fx.GraphModule) -> Partition:
    """Return the program without all-gathers as one part, and the all-gathers, if any, as another part."""
    starts = gather_starts(gm.graph, backward=False)
    fulls = [full for start in starts for _, full in unsharded_parameters(start)]
    if not fulls:
        return _partition(Part(gm, (), ()))
    gather, program = PartBuilder(gm), PartBuilder(gm)
    gather.include(fulls, lambda _: None)
    names = {full: StageValue(full.name) for full in fulls}
    output = gm.graph.output_node()
    # gradients belong to parameters, so these stay inputs, even if nothing else reads their shards
    own = [n for n in gm.graph.nodes if n is not output and n not in gather.included]
    program.include([*gm.graph.find_nodes(op="placeholder"), *own], names.get)
    results = results_of(gm.graph)
    program.include([node for _, node in results], names.get)
    reads = tuple(names[node] for node in program.reads())
    part = Part(program.build(results, "Program"), reads, ())
    built = gather.build([(names[n], n) for n in fulls], "Gather")
    return _partition(part, Part(built, (), tuple(n.name for n in fulls)))


def _partition(part: Part, *gathers: Part) -> Partition:
    return Partition(1, None, (part,), (None,), (), {}, (), gathers)
