"""Determine when in a step a node runs: before the first micro-batch, in each, or after the last.

    gathers      of the sharded parameters that a stage reads
    prologue     collectives that depend on the inputs alone (token counts), on the rank's global batch
    microbatch   forward and backward of one micro-batch
    epilogue     everything after sums over all micro-batches: the loss, the reduced gradients, and outputs
                 that need the global batch (a variance that is only shown)

A Partial value sums over micro-batches as over ranks. A collective in the middle of the forward or backward
(BatchNorm's statistics) would need all micro-batches at once: with several micro-batches it is refused.
Blocks of `fxdp.Bitwise` have no prologue: they run in rounds, with such collectives in between (`rounds.py`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace

from torch import fx

from fxdp.errors import StageError
from fxdp.ir import redistributions
from fxdp.ir.graph.draws import node_draws
from fxdp.ir.graph.graph_text import target_text
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Input, Mutation
from fxdp.ir.types.placements import P, ParamShard, Partial, R, Replicate, Shard
from fxdp.ir.types.sizes import is_axis
from fxdp.ir.types.value_types import ScalarType, TensorType
from fxdp.pipeline.cut.node_roles import free_nodes, heavy_before, input_only, parameter_views
from fxdp.pipeline.cut.rounds import Rounds, find_rounds


@dataclass
class Phases:
    """The role of each node in a cut into phases."""

    prologue: list[fx.Node]
    """Values that the prologue computes for all stages: results of collectives, and shared random numbers."""
    gathered: list[fx.Node]
    """Waits of the all-gathers of sharded parameters; each stage gathers the parameters that it reads."""
    epilogue: set[fx.Node]
    free: set[fx.Node]
    """Cheap nodes that any part may recompute."""
    views: set[fx.Node]
    """Parameters, and their views and casts."""
    backward: set[fx.Node] = field(default_factory=set)
    """Nodes of the microbatch phase that belong to the backward."""
    rounds: Rounds = field(default_factory=Rounds)
    """With blocks, the rounds in which all nodes but those of the epilogue run."""

    def is_own(self, node: fx.Node) -> bool:
        """Return whether a node runs once per micro-batch, on a single stage."""
        if node.op != "call_function" or node in self.epilogue or node in self.rounds.once:
            return False
        return node not in self.free and node not in self.views


def find_phases(graph: fx.Graph, microbatches: int, block: int | None = None) -> Phases:
    """Sort the nodes of a LOCAL program into phases, for micro-batches or blocks of this many samples.

    Raises
    ------
    StageError : collectives that would need all micro-batches at once, all listed with their lines; inputs
        that the model changes; a backward that draws random numbers.
    """
    _refuse_changed_inputs(graph)
    _refuse_noisy_backward(graph)
    several = block is not None or microbatches > 1
    phases = _without_epilogue(graph, several)
    late, stuck = _epilogue(graph, phases, several and block is None)
    if block is not None:
        return _in_rounds(graph, phases, late)
    if several:
        _refuse(stuck + _part_numbers(graph), microbatches)
    return _with_epilogue(phases, late)


def recall_phases(graph: fx.Graph, *, several: bool, by_block: bool = False) -> Phases:
    """Return the phases of a program that `assign-stages` has annotated, for one or several micro-batches."""
    phases = _without_epilogue(graph, several)
    late = {n for n in graph.nodes if meta(n).once}
    return _in_rounds(graph, phases, late) if by_block else _with_epilogue(phases, late)


def _with_epilogue(phases: Phases, late: set[fx.Node]) -> Phases:
    return replace(phases, epilogue=late, backward=phases.backward - late)


def _in_rounds(graph: fx.Graph, phases: Phases, late: set[fx.Node]) -> Phases:
    """Return the phases of a step over blocks, in which no op reads the samples of several blocks."""
    results = {node for _, node in results_of(graph)}
    read_late = {n for n in phases.free if n in results or any(user in late for user in n.users)}
    of_blocks = {n for n in read_late if n.op == "call_function" and _is_of_samples(n)}
    rounds = find_rounds(graph, input_only(graph), late | phases.views)
    free = phases.free - of_blocks - rounds.once.keys()
    return _with_epilogue(replace(phases, prologue=[], free=free, rounds=rounds), late)


def _is_of_samples(node: fx.Node) -> bool:
    return any(isinstance(placement, Shard | Partial) for placement in meta(node).placements)


def _without_epilogue(graph: fx.Graph, several: bool) -> Phases:
    early = _prologue(graph, several)
    free = free_nodes(graph, [*early, *heavy_before(early)])
    free |= {n.args[0] for n in early if n.target in (redistributions.wait, operator.getitem)}  # type: ignore[misc]
    views = parameter_views(graph) - free
    elsewhere = free | views
    backward = {n for n in graph.nodes if n.op == "call_function" and meta(n).backward and n not in elsewhere}
    return Phases(early, _gathered(graph), set(), free, views, backward)


def _gathered(graph: fx.Graph) -> list[fx.Node]:
    """Return the waits of sharded parameters' all-gathers."""
    starts = graph.find_nodes(op="call_function", target=redistributions.all_gather_shards)
    return [user for start in starts for user in start.users if user.target is redistributions.wait]


def _prologue(graph: fx.Graph, several: bool) -> list[fx.Node]:
    """Return waits of collectives, and shared random values, that depend on inputs alone."""
    known = input_only(graph)
    found: list[fx.Node] = []
    for node in graph.nodes:
        if node not in known:
            continue
        communicates = node.target is redistributions.wait and (
            several or node.args[0].target is redistributions.broadcast
        )
        if communicates or (node_draws(node) and isinstance(meta(node).type, TensorType)):
            found.append(node)
    return found


def _epilogue(graph: fx.Graph, phases: Phases, several: bool) -> tuple[set[fx.Node], list[fx.Node]]:
    """Return the nodes after the last micro-batch, and the collectives that block micro-batches."""
    elsewhere = phases.free | phases.views
    output = graph.output_node()
    after: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node in elsewhere:
            continue
        if node.target in redistributions.COLLECTIVES or any(a in after for a in node.all_input_nodes):
            after.add(node)
    late: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in after:
            continue
        full = isinstance(meta(node).placement, Replicate | ParamShard)
        may = full or (several and (_only_shows(node, phases.views) or _adds_up(node)))
        if may and all(user is output or user in late for user in node.users):
            late.add(node)
    stuck = [
        n for n in graph.nodes if n in after and n not in late and n.target in redistributions.COLLECTIVES
    ]
    return late, stuck


def _part_numbers(graph: fx.Graph) -> list[fx.Node]:
    """Return exchanges of sizes that tell micro-batches which rows of the rank are theirs.

    The prologue exchanges the sizes of the rank's global batch. Totals are the same in each micro-batch, but
    where its own rows begin is not known.
    """
    known = input_only(graph)

    def is_total(node: fx.Node) -> bool:
        type_ = meta(node).type
        return isinstance(type_, ScalarType) and is_axis(type_.expr)

    def is_known_before(node: fx.Node) -> bool:
        if is_total(node) or (node in known and node.target in redistributions.COLLECTIVES):
            return True
        return node in known and bool(node.users) and all(map(is_known_before, node.users))

    starts = graph.find_nodes(op="call_function", target=redistributions.exchange_sizes)
    return [n for n in starts if not all(map(is_known_before, n.users))]


def _only_shows(node: fx.Node, parameters: set[fx.Node]) -> bool:
    """Return whether a node that only results read may read the samples of all micro-batches at once.

    False for ops of the backward, and for layers: these would run replicated at the end of the step.
    """
    layer = any(a in parameters and _dims(a) > 0 for a in node.all_input_nodes)
    return not meta(node).backward and not layer


def _adds_up(node: fx.Node) -> bool:
    """Return whether a Partial value can be computed from sums: all operands are Partial or replicated.

    One example is the gradient of a weight whose mean the model reads as well: this share of the gradient
    comes from a single number.
    """
    made_of = [meta(a).placement for a in node.all_input_nodes if isinstance(meta(a).type, TensorType)]
    return meta(node).placement == P and all(placement in (P, R) for placement in made_of)


def _dims(node: fx.Node) -> int:
    type_ = meta(node).type
    return len(type_.shape) if isinstance(type_, TensorType) else 0


_OWN_STATISTICS = (
    ', or fxdp.Pipeline(batch_stats="microbatch"): BatchNorm then normalizes each micro-batch by its own '
    "statistics, and only the running statistics follow the global batch"
)
_IN_ROUNDS = (
    "; or numerics=fxdp.Bitwise(block=...): blocks of so many samples, which wait for one "
    "another where BatchNorm needs all"
)


def _refuse(stuck: list[fx.Node], microbatches: int) -> None:
    if stuck:
        own = _own_statistics(stuck)
        raise StageError(
            f"fxdp.Pipeline(microbatches={microbatches}): the model needs values of the global batch in the "
            "midst of a micro-batch, so micro-batches cannot run one after the other:\n  "
            f"{fault_lines(stuck)}\nUse fxdp.Pipeline(microbatches=1) for this model, or layers that treat "
            f"samples alone (GroupNorm, LayerNorm){own}{_IN_ROUNDS if own else ''}"
        )


def _own_statistics(collectives: list[fx.Node]) -> str:
    """Return the remedy for collectives of BatchNorms, or nothing."""
    return _OWN_STATISTICS if any(n.args[1:] == ("moments",) for n in collectives) else ""


def fault_lines(collectives: list[fx.Node]) -> str:
    """Return the locations that need the global batch, a line each, with the ops there."""
    places: dict[str, list[str]] = {}
    for node in collectives:
        place, need = _fault(node)
        places.setdefault(place, []).append(need)
    return "\n  ".join(f"{at}: {', '.join(dict.fromkeys(needs))}" for at, needs in places.items())


def _refuse_changed_inputs(graph: fx.Graph) -> None:
    specs = meta(graph.output_node()).results
    paths = [spec.of.path for spec in specs if isinstance(spec, Mutation) and isinstance(spec.of, Input)]
    if paths:
        raise StageError(
            f"the model changes its input {', '.join(paths)} in place, and the caller's tensor with it; "
            "stages and micro-batches read parts of their inputs, which they leave as they are. Let the "
            f"model change a copy: {paths[0]} = {paths[0]}.clone()"
        )


def _refuse_noisy_backward(graph: fx.Graph) -> None:
    drawn = next((n for n in graph.nodes if node_draws(n) and meta(n).backward), None)
    if drawn is not None:
        raise StageError(
            f"at {meta(drawn).location}: the backward draws random numbers (a hook adds noise to "
            "gradients?), "
            "which stages and micro-batches would share. Draw them in the forward, or use "
            "fxdp.Pipeline(microbatches=1) without stages"
        )


def _fault(node: fx.Node) -> tuple[str, str]:
    """Return a location that needs the global batch, and the op there."""
    cause = meta(node).cause
    if cause is None:
        return f"at {meta(node).location}", target_text(node.target)
    return f"at {cause.location}", f"{target_text(node.target)} for {cause.words}"
