"""From a captured model to a program: run the passes down to LOCAL, then cut the program into parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import fx

from fxdp.capture.captured import Captured
from fxdp.capture.refusals.ragged import check_bags
from fxdp.capture.refusals.sparse_tables import check_sparse_gradients
from fxdp.compiler.deterministic_kernels import check_kernels
from fxdp.compiler.option_combinations import (
    check_coupled,
    check_options,
    check_ragged_blocks,
    check_reductions,
    check_schedule,
    check_sharding,
)
from fxdp.compiler.order import Order
from fxdp.compiler.pass_manager import PassManager
from fxdp.compiler.program import Program, ScheduledStep
from fxdp.compiler.records import log_captured
from fxdp.compiler.verifier import verify
from fxdp.errors import MeshError, PlacementError, StageError
from fxdp.ir.graph.factors import SUFFICIENT_FACTORS
from fxdp.ir.graph.graph_text import target_text, type_text
from fxdp.ir.graph.graphs import copy_graph, inputs_of, results_of
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import has_no_rule, meta, tensor_operands, tensor_type
from fxdp.ir.graph.redistribution_cause import unconverted
from fxdp.ir.graph.signature import Mutation, OutputSpec, Parameter, StageValue, Tangent
from fxdp.ir.types.mesh import Mesh
from fxdp.options import Options
from fxdp.pipeline.cut.partition import Part, Partition
from fxdp.pipeline.cut.phases import recall_phases
from fxdp.pipeline.cut.split import split, split_gathers
from fxdp.pipeline.schedule.catalogue import make

_GROWTH = 2
"""Growth of the batch up to which sufficient factors may still save bytes; beyond, recompile."""


def is_cut(mesh: Mesh, options: Options) -> bool:
    """Return whether a program runs in stages or micro-batches, with the backward inside the call."""
    return mesh.pipeline.size > 1 or options.has_microbatches


def post_forward_size(mesh: Mesh, options: Options) -> int:
    """Return the size of the groups that gather parameters for the backward.

    0 stands for a gather among all ranks, or for no gather.
    """
    may = options.strategy in ("shard", "auto") and not is_cut(mesh, options)
    among = options.post_forward_size if may else 0
    return among if 1 < among < mesh.size_along(mesh.shard_axis) else 0


def prepare(
    captured: Captured, mesh: Mesh, options: Options, batch: int, *, cut: bool | None = None,
    kept: frozenset[str] = frozenset(),
) -> Program:  # fmt: skip
    """Run the passes, and cut the program if mesh and options (or `cut`) ask for stages or micro-batches.

    `batch` is the number of samples of all ranks together in the first call, from which costs are computed;
    `kept` are the names of parameters that stay unsharded from forward to backward under `strategy="shard"`.

    Raises
    ------
    PlacementError : with `strict=True`, an op without a rule, which would run replicated.
    MeshError : see `check_options`, `check_sharding`, `_check_writes` and `check_sparse_gradients`.
    StageError : no loss in the graph, no stages as named, or a model that cannot run in micro-batches.
    """
    cut = is_cut(mesh, options) if cut is None else cut
    check_sharding(mesh, options)
    mesh = mesh if cut else replace(mesh, post_forward_size=post_forward_size(mesh, options))
    mesh = replace(mesh, link=options.link or mesh.link)
    _check_writes(captured, options, cut=cut)
    check_sparse_gradients(
        captured.gm.graph, captured.origin, options.strategy, stages=mesh.pipeline.size > 1, microbatches=cut
    )
    if cut:
        check_options(mesh, options)
        check_ragged_blocks(captured, options)
        check_reductions(captured, options)
        if options.block is not None:
            check_kernels(captured.gm.graph, mesh.device_type, options.block)
    loss = _loss_index(captured.gm.graph) if cut else None
    order = Order.of(captured, options, _stage_count(options, mesh) if cut else None, batch, kept)
    # for the passes each micro-batch is one more rank: a sum over both is a sum over one axis
    several = cut and options.has_microbatches
    # of blocks every rank may have another number, on which no pass depends
    parts = mesh.in_parts(max(2, options.pipeline.microbatches)) if several else mesh
    folder = options.debug.dump_dir
    dump_dir = Path(folder) if folder is not None and mesh.rank == 0 else None
    manager = PassManager(parts, options.debug.verify, dump_dir)
    if parts.size > 1:
        check_bags(captured.gm.graph, captured.origin)
    nodes = len(captured.gm.graph.nodes)
    log_captured(captured.gm)
    gm = manager.run(captured.gm, order.explicit)
    if options.strict:
        _refuse_fallbacks(gm)
    causes = copy_graph(gm)
    gm = manager.run(gm, order.local)
    if cut:
        partition, step = _cut(gm, captured, mesh, options, order, loss, batch)
    else:
        gm = manager.run(gm, order.reductions)
        partition, step = _uncut(gm, options), None
    most = _GROWTH * batch if _has_sufficient_factors(causes.graph) else None
    seconds = manager.seconds
    return Program(captured, gm, mesh, options, causes, partition, step, seconds, nodes, most_samples=most)


def _uncut(gm: fx.GraphModule, options: Options) -> Partition:
    """Return a partition with one part, and separate parts for gathers that do not run at each call."""
    if not options.keeps_unsharded:
        return Partition(1, None, (Part(gm, (), ()),), (None,), (), {}, ())
    partition = split_gathers(gm)
    for part in (*partition.parts, *partition.gathers):
        if options.debug.verify and part is not None:
            verify(part.gm, Level.LOCAL, "the cut before gathers")
    return partition


def _cut(
    gm: fx.GraphModule,
    captured: Captured,
    mesh: Mesh,
    options: Options,
    order: Order,
    loss: int | None,
    batch: int,
) -> tuple[Partition, ScheduledStep]:
    stages = _stage_count(options, mesh)
    count = stages if isinstance(stages, int) else len(stages) + 1
    block = options.block
    # with blocks an example: each rank's call has a schedule for its own blocks
    microbatches = -(-batch // (block * mesh.size)) if block else options.pipeline.microbatches
    phases = recall_phases(gm.graph, several=options.has_microbatches, by_block=block is not None)
    coupled = phases.rounds.coupled
    check_coupled(coupled, options)
    # of blocks that wait for one another each stage runs all
    name = "gpipe" if coupled else options.pipeline.schedule
    schedule = make(name, count, mesh.pipeline.size, microbatches)
    check_schedule(schedule, options)
    partition = split(gm, phases, count)
    if block is None and microbatches > 1:
        partition = partition.with_sums()
    epilogues = tuple(_reduced(part, mesh, options, order) for part in partition.epilogues)
    schedule = schedule if loss is not None else schedule.forward_only()
    step = ScheduledStep(schedule, loss, frozenset(captured.detached))
    gathers = tuple(_reduced(part, mesh, options, order) for part in partition.gathers)
    return replace(partition, gathers=gathers, epilogues=epilogues), step


def _reduced(part: Part | None, mesh: Mesh, options: Options, order: Order) -> Part | None:
    """Run the passes on reductions on a part that runs once per step, on the mesh without micro-batches."""
    if part is None:
        return None
    gm = PassManager(mesh, options.debug.verify, level=Level.LOCAL).run(part.gm, order.reductions)
    output = gm.graph.output_node()
    # from here on all results are values that other parts or the step's results read
    results: tuple[OutputSpec, ...] = tuple(StageValue(name) for name in part.gives)
    meta(output).results = results
    return replace(part, gm=gm)


def _stage_count(options: Options, mesh: Mesh) -> int | tuple[str, ...]:
    """Return the number of stages, or the names of the modules at which stages 1, 2, ... begin.

    Raises
    ------
    StageError : fewer stages than pipeline ranks.
    """
    ranks = mesh.pipeline.size
    stages = options.pipeline.stages
    if stages is None:
        return ranks * (2 if options.pipeline.schedule == "interleaved" and ranks > 1 else 1)
    count = stages if isinstance(stages, int) else len(stages) + 1
    if count < ranks:
        raise StageError(
            f"fxdp.Pipeline(stages={stages!r}) makes {count} stages for {ranks} pipeline ranks; "
            "expected at least one per rank"
        )
    return stages if isinstance(stages, int) else tuple(stages)


def _check_writes(captured: Captured, options: Options, *, cut: bool) -> None:
    """Refuse writes into parameters that are sharded, or that several micro-batches would change.

    Raises
    ------
    MeshError : names the parameters.
    """
    of = [spec.of for spec, _ in results_of(captured.gm.graph) if isinstance(spec, Mutation)]
    names = [spec.name for spec in of if isinstance(spec, Parameter)]
    if names and (cut or options.strategy != "replicate"):
        raise MeshError(
            f"the forward changes parameters in place ({', '.join(names)}), which needs all of them on each "
            f"rank, and its samples at once; expected strategy='replicate' (got {options.strategy!r}), no pp "
            "axis and fxdp.Pipeline(microbatches=1). Or write into buffers (register_buffer)"
        )


def _loss_index(graph: fx.Graph) -> int | None:
    """Return the index of the differentiated output, the only scalar with a tangent (see `JointOptions`).

    None for a graph without backward.

    Raises
    ------
    StageError : the model has outputs to differentiate, but none is a scalar.
    """
    tangents = inputs_of(graph, Tangent)
    if not tangents:
        return None
    for spec, node in tangents:
        if tensor_type(node).shape == ():
            return spec.index
    raise StageError(
        "a step in stages or micro-batches runs the backward inside of the call, so the loss must be in "
        "the graph; the model returns no scalar that depends on its parameters. Pass loss_fn= to "
        "fxdp.compile, or let the model return its loss; for outputs alone, call it under torch.no_grad()"
    )


def _refuse_fallbacks(gm: fx.GraphModule) -> None:
    """Refuse ops without a placement rule in an EXPLICIT program (`strict=True`).

    Raises
    ------
    PlacementError : names each op with line, module, operands and placements.
    """
    nodes = [node for node in gm.graph.nodes if has_no_rule(node)]
    if nodes:
        listing = "\n  ".join(map(_fallback_text, nodes))
        raise PlacementError(
            f"strict=True: {len(nodes)} ops have no placement rule and would run replicated on every rank:\n"
            f"  {listing}\n"
            "Give them rules with fxdp.register_rule, or compile with strict=False: that is exact, but slower"
        )


def _fallback_text(node: fx.Node) -> str:
    sources = map(unconverted, tensor_operands(node))
    operands = ", ".join(f"%{s.name}: {type_text(meta(s).type)} {{{meta(s).placement}}}" for s in sources)
    return f"{target_text(node.target)} at {meta(node).location}\n    operands: {operands or 'none'}"


def _has_sufficient_factors(graph: fx.Graph) -> bool:
    """Return whether some gradients are computed from sufficient factors."""
    return any(meta(node).reason == SUFFICIENT_FACTORS for node in graph.nodes)
