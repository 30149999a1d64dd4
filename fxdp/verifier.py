"""The invariants of each level, one small check each; all faults are reported at once.

A fault is a bug in a pass or in a registered rule, never the user's. Each line shows the node as the
golden text prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from fxdp import ir
from fxdp.annotations import Output, ScalarType, Size, TensorType, is_host_size, note, tensor_operands
from fxdp.errors import VerifierError
from fxdp.graph_text import node_text
from fxdp.pass_manager import Level
from fxdp.placements import Partial, Placement, Shard
from fxdp.symbols import batch_factor, exact_quotient

Fault = tuple[fx.Node, str]
Check = Callable[[fx.Graph], Iterator[Fault]]


def inputs_have_slots(graph: fx.Graph) -> Iterator[Fault]:
    """CAPTURED: every placeholder is a parameter, buffer, input, ... of the program, each once."""
    seen = set()
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        slot = note(node).slot
        if slot is None:
            yield node, "has no slot"
        elif slot in seen:
            yield node, "has the slot of another placeholder"
        seen.add(slot)


def results_have_slots(graph: fx.Graph) -> Iterator[Fault]:
    """CAPTURED: every result is an output, a mutation or a gradient."""
    node = graph.output_node()
    if len(node.args[0]) != len(note(node).results):  # type: ignore[arg-type]
        yield node, f"has {len(node.args[0])} results and {len(note(node).results)} slots"  # type: ignore[arg-type]


def tensors_have_types(graph: fx.Graph) -> Iterator[Fault]:
    """CAPTURED: every value that an op reads as a tensor has a type."""
    for node in graph.nodes:
        if node.op in ("placeholder", "call_function") and node.users and note(node).type is None:
            yield node, "has no type"


def tensors_are_placed(graph: fx.Graph) -> Iterator[Fault]:
    """PLACED: every tensor has a placement, and each of its ops one per operand."""
    for node in graph.nodes:
        known = note(node)
        if isinstance(known.type, (TensorType, tuple)) and known.placement is None:
            if node.users:
                yield node, "has no placement"
        elif known.operands and node.op == "call_function" and len(known.operands) != len(tensor_operands(node)):
            yield node, f"has {len(tensor_operands(node))} operands and {len(known.operands)} operand placements"


def shards_fit_shapes(graph: fx.Graph) -> Iterator[Fault]:
    """PLACED: a sharded dim is `outer * B * inner`."""
    for node in graph.nodes:
        type_, placement = note(node).type, note(node).placement
        types = type_ if isinstance(type_, tuple) else (type_,)
        placements = placement if isinstance(placement, tuple) else (placement,)
        for one, where in zip(types, placements, strict=False):
            if isinstance(one, TensorType) and isinstance(where, Shard) and not _fits(one, where):
                yield node, f"cannot be {where}: that dim is no multiple of the batch"


def _fits(type_: TensorType, placement: Shard) -> bool:
    if not 0 <= placement.dim < len(type_.shape):
        return False
    factor = batch_factor(type_.shape[placement.dim])
    return factor is not None and exact_quotient(factor, placement.outer) is not None


def edges_need_no_conversion(graph: fx.Graph) -> Iterator[Fault]:
    """EXPLICIT: every operand is in the placement that its consumer reads it in."""
    for node in graph.nodes:
        wanted = note(node).operands
        sources = list(node.args[0]) if node.op == "output" else tensor_operands(node)
        for source, placement in zip(sources, wanted, strict=False):
            if placement is not None and note(source).placement != placement:
                yield node, f"reads %{source.name} as {placement}, which is {note(source).placement}"


def collectives_have_one_wait(graph: fx.Graph) -> Iterator[Fault]:
    """EXPLICIT: a collective is waited for exactly once, and read by its wait alone."""
    for node in graph.nodes:
        if node.target in ir.COLLECTIVES:
            users = list(node.users)
            if len(users) != 1 or users[0].target is not ir.wait:
                yield node, f"needs exactly one wait, has {len(users)} users"
        elif node.target is ir.wait and node.args[0].target not in ir.COLLECTIVES:
            yield node, "waits for what is no collective"


def collectives_have_causes(graph: fx.Graph) -> Iterator[Fault]:
    """EXPLICIT: every collective says which op needs it."""
    for node in graph.nodes:
        if node.target in ir.COLLECTIVES and note(node).cause is None:
            yield node, "has no cause"


def partial_flows_through_linear_ops(graph: fx.Graph) -> Iterator[Fault]:
    """EXPLICIT: an op that reads a Partial value gives Partial values, or reduces it."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target in ir.CONVERSIONS:
            continue
        if any(isinstance(p, Partial) for p in note(node).operands) and not _gives_partial(note(node).placement):
            yield node, "reads a Partial value but gives none"


def _gives_partial(placement: Placement | tuple[Placement | None, ...] | None) -> bool:
    placements = placement if isinstance(placement, tuple) else (placement,)
    return any(isinstance(p, Partial) for p in placements)


def results_are_not_partial(graph: fx.Graph) -> Iterator[Fault]:
    """EXPLICIT: no Partial value leaves the program."""
    node = graph.output_node()
    for value in node.args[0]:  # type: ignore[union-attr]
        if isinstance(value, fx.Node) and isinstance(note(value).placement, Partial):
            yield value, "leaves the program as a Partial value"


def sizes_are_own(graph: fx.Graph) -> Iterator[Fault]:
    """LOCAL: host integers come from the program's size slots, not from captured shapes."""
    for node in graph.nodes:
        if not is_host_size(node):
            continue
        for source in node.all_input_nodes:
            if isinstance(note(source).type, ScalarType):
                continue
            yield node, f"reads a size from the tensor %{source.name}"


def outputs_are_in_order(graph: fx.Graph) -> Iterator[Fault]:
    """CAPTURED: the outputs come in the order of their indices."""
    node = graph.output_node()
    indices = [slot.index for slot in note(node).results if isinstance(slot, Output)]
    if indices != sorted(set(indices)):
        yield node, f"has outputs {indices}"


def everything_is_executable(graph: fx.Graph) -> Iterator[Fault]:
    """EMITTED: nothing of `ir.py` is left, and no size slot is read after being bound."""
    for node in graph.nodes:
        if node.target in ir.CONVERSIONS:
            yield node, "is not lowered"
        elif node.op == "placeholder" and isinstance(note(node).slot, Size) and node.type is not None:
            yield node, "is a size with a tensor type"


CHECKS: dict[Level, tuple[Check, ...]] = {
    Level.CAPTURED: (inputs_have_slots, results_have_slots, tensors_have_types, outputs_are_in_order),
    Level.PLACED: (tensors_are_placed, shards_fit_shapes),
    Level.EXPLICIT: (
        edges_need_no_conversion,
        collectives_have_one_wait,
        collectives_have_causes,
        partial_flows_through_linear_ops,
        results_are_not_partial,
    ),
    Level.LOCAL: (sizes_are_own,),
    Level.EMITTED: (everything_is_executable,),
}
"""The checks that each level adds to those before it."""

_UNTIL: dict[Check, Level] = {
    edges_need_no_conversion: Level.LOCAL,
    collectives_have_one_wait: Level.LOCAL,
    collectives_have_causes: Level.LOCAL,
    partial_flows_through_linear_ops: Level.LOCAL,
    tensors_are_placed: Level.LOCAL,
}
"""Checks on annotations that emission, which lowers several functions to one, no longer keeps."""


def verify(gm: fx.GraphModule, level: Level, after: str) -> None:
    """Check all invariants up to `level`.

    Raises
    ------
    VerifierError : listing every fault with its line; `after` names the pass to blame.
    """
    gm.graph.lint()
    faults: list[str] = []
    for step, checks in CHECKS.items():
        for check in checks:
            if step <= level <= _UNTIL.get(check, level):
                faults += [f"{node_text(node, ('dp',))}\n    {what}" for node, what in check(gm.graph)]
    if faults:
        listing = "\n  ".join(faults)
        raise VerifierError(f"after {after}, the graph breaks level {level.name} in {len(faults)} places:\n  {listing}")
