"""The invariants of a program, one small check each, which yields every faulty node with the fault.

Each check names the first level at which the invariant holds, and some the last level: emission lowers
several functions to one, and drops annotations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from fxdp.capture.export.skip_marks import MARK
from fxdp.compiler.sharding_checks import SHARDING_CHECKS
from fxdp.ir import redistributions
from fxdp.ir.graph.graphs import given_arguments
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import Metadata, is_host_size, meta, tensor_operands
from fxdp.ir.graph.signature import Output, StageValue
from fxdp.ir.op_kinds import linear_groups, reads_shape_alone
from fxdp.ir.types.born_axes import read_from_rows
from fxdp.ir.types.placements import Partial, Placement, R, Shard
from fxdp.ir.types.sizes import batch_factor, exact_quotient
from fxdp.ir.types.value_types import ScalarType, TensorType
from fxdp.pipeline.cut.stage_checks import STAGE_CHECKS
from fxdp.torch_compat import OpOverload, aten

_Fault = tuple[fx.Node, str]
_Check = Callable[[fx.Graph], Iterator[_Fault]]

CHECKS: dict[Level, list[_Check]] = {level: list(SHARDING_CHECKS.get(level, ())) for level in Level}
"""The checks that each level adds to those of earlier levels."""
CHECKS[Level.STAGED] += STAGE_CHECKS

UNTIL: dict[_Check, Level] = {
    **dict.fromkeys(STAGE_CHECKS, Level.STAGED),
    **dict.fromkeys((check for checks in SHARDING_CHECKS.values() for check in checks), Level.LOCAL),
}
"""The last level at which a check holds, for checks that do not hold up to EMITTED."""


def _holds(level: Level, until: Level | None = None) -> Callable[[_Check], _Check]:
    def register(check: _Check) -> _Check:
        CHECKS[level].append(check)
        if until is not None:
            UNTIL[check] = until
        return check

    return register


@_holds(Level.CAPTURED)
def _inputs_have_specs(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that every placeholder has a spec (parameter, buffer, input, ...), each a different one."""
    seen = set()
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        spec = meta(node).spec
        if spec is None:
            yield node, "has no spec in the signature"
        elif spec in seen:
            yield node, "has the spec of another placeholder"
        seen.add(spec)


@_holds(Level.CAPTURED)
def _results_have_specs(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that every result has a spec (output, mutation or gradient), each a different one."""
    node = graph.output_node()
    values, specs = _results(node), meta(node).results
    if len(values) != len(specs):
        yield node, f"has {len(values)} results and {len(specs)} slots"
    if None in specs or len(set(specs)) < len(specs):
        yield node, "has results without a slot of their own"


def _results(output: fx.Node) -> tuple[fx.Node, ...]:
    return tuple(output.args[0])  # type: ignore[arg-type]


@_holds(Level.CAPTURED)
def _tensors_have_types(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that every value that an op reads as a tensor has a type."""
    for node in graph.nodes:
        if node.op in ("placeholder", "call_function") and node.users and meta(node).type is None:
            yield node, "has no type"


@_holds(Level.CAPTURED)
def _outputs_are_in_order(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that the outputs come in the order of their indices."""
    node = graph.output_node()
    indices = [spec.index for spec in meta(node).results if isinstance(spec, Output)]
    if indices != sorted(set(indices)):
        yield node, f"has outputs {indices}"


@_holds(Level.CAPTURED)
def _no_skip_marks_are_left(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that capture has replaced all marks of skip connections by edges."""
    for node in graph.find_nodes(op="call_function", target=MARK):
        yield node, "marks a skip connection that has no route"


@_holds(Level.PLACED, until=Level.LOCAL)
def _tensors_are_placed(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that every tensor has a placement, and every op one placement per operand."""
    for node in graph.nodes:
        known = meta(node)
        if isinstance(known.type, (TensorType, tuple)) and known.placement is None:
            if node.users:
                yield node, "has no placement"
        elif node.op == "call_function" and not is_host_size(node):
            read, wanted = len(tensor_operands(node)), len(known.operands)
            if read != wanted:
                yield node, f"has {read} operands and {wanted} operand placements"


@_holds(Level.PLACED)
def _shards_fit_shapes(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that the size of a sharded dim is `outer * B * inner`."""
    for node in graph.nodes:
        known = meta(node)
        for one, where in zip(known.types, known.placements, strict=False):
            if isinstance(one, TensorType) and isinstance(where, Shard) and not _fits(one, where):
                yield node, f"cannot be {where}: that dim is no multiple of the batch"


def _fits(type_: TensorType, placement: Shard) -> bool:
    if not 0 <= placement.dim < len(type_.shape):
        return False
    factor = batch_factor(type_.shape[placement.dim])
    return factor is not None and exact_quotient(factor, placement.outer) is not None


@_holds(Level.EXPLICIT, until=Level.LOCAL)
def _edges_need_no_redistribution(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that every operand has the placement in which the consumer reads this operand."""
    for node in graph.nodes:
        wanted = meta(node).operands
        sources = _results(node) if node.op == "output" else tensor_operands(node)
        # `_tensors_are_placed` reports a missing one
        for source, placement in zip(sources, wanted, strict=False):
            if placement is not None and meta(source).placement != placement:
                yield node, f"reads %{source.name} as {placement}, which is {meta(source).placement}"


@_holds(Level.EXPLICIT, until=Level.LOCAL)
def _redistributions_do_what_they_say(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that a redistribution connects the placements in its name, and that a wait changes nothing."""
    for node in graph.nodes:
        if node.target not in redistributions.REDISTRIBUTIONS:
            continue
        values = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
        # numbers of rows are equal on no two ranks, and of no placement
        befores = {meta(value).placement or R for value in values}
        before, after = next(iter(befores)), meta(node).placement
        if len(befores) > 1:
            yield node, f"reads values in several placements {sorted(map(str, befores))}"
            continue
        if node.target is redistributions.wait:
            if before != after:
                yield node, f"turns {before} into {after}"
            continue
        found = redistributions.redistribution_of(node)
        assert found is not None
        if not (isinstance(before, found.takes) and isinstance(after, found.gives)):
            yield node, f"turns {before} into {after}"
            continue
        if isinstance(before, Partial) and found.reduction(node) != before.op:
            yield node, f"reduces {before} by {found.reduction(node)}"
            continue
        type_, sharded = meta(values[0]).type, [p for p in (before, after) if isinstance(p, Shard)]
        if not isinstance(type_, TensorType) or not all(_fits(type_, shard) for shard in sharded):
            continue  # reported by `_tensors_are_placed` and `_shards_fit_shapes`
        named = found.arguments(type_, before, after)
        if node.args[1 : 1 + len(named)] != named:
            listing = " and ".join(map(str, sharded))
            yield node, f"does not name the dim and outer factor of {listing}"


@_holds(Level.EXPLICIT, until=Level.LOCAL)
def _collectives_have_one_wait(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that a collective has exactly one wait and no other reader."""
    for node in graph.nodes:
        if node.target in redistributions.COLLECTIVES:
            users = [u for u in node.users if u.target not in redistributions.ORDERED or u.args[0] is node]
            if len(users) != 1 or users[0].target is not redistributions.wait:
                yield node, f"needs exactly one wait, has {len(users)} users"
        elif node.target is redistributions.wait and node.args[0].target not in redistributions.COLLECTIVES:
            yield node, "waits for what is no collective"


@_holds(Level.EXPLICIT, until=Level.LOCAL)
def _collectives_have_causes(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that every collective names the op that needs it."""
    for node in graph.nodes:
        if node.target in redistributions.COLLECTIVES and meta(node).cause is None:
            yield node, "has no cause"


@_holds(Level.EXPLICIT, until=Level.LOCAL)
def _partial_flows_through_linear_ops(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that an op that reads Partial values is linear in these values and gives only Partial values."""
    for node in graph.nodes:
        wanted = meta(node).operands
        if node.op != "call_function" or node.target in redistributions.REDISTRIBUTIONS:
            continue
        if not any(isinstance(p, Partial) for p in wanted):
            continue
        if reads_shape_alone(node.target):
            if _gives_partial(meta(node)):
                yield node, "reads no more than the shape of a Partial value but gives one"
        elif not _gives_partial(meta(node)):
            yield node, "reads a Partial value but gives none"
        elif not _is_linear(node, wanted):
            yield node, "reads a Partial value in which it is not linear"


def _gives_partial(known: Metadata) -> bool:
    return known.placement is not None and all(p is None or isinstance(p, Partial) for p in known.placements)


def _is_linear(node: fx.Node, wanted: tuple[Placement | None, ...]) -> bool:
    """Return whether an op is linear in all Partial operands, from a table of torch's pointwise ops.

    This is independent of the placement rules. An op that is not pointwise is assumed to be linear.
    """
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return True
    if torch.Tag.pointwise not in target.tags or target._schema.name.endswith("_backward"):
        return True
    if target is aten.masked_fill.Scalar:
        return bool(node.args[2] == 0)
    given = [(name, a) for name, a in given_arguments(node).items() if isinstance(a, fx.Node)]
    tensors = [name for name, source in given if isinstance(meta(source).type, TensorType)]
    terms = {n for n, p in zip(tensors, wanted, strict=True) if isinstance(p, Partial)}
    return any(terms == set(group).intersection(tensors) for group in linear_groups(target))


@_holds(Level.EXPLICIT)
def _results_are_not_partial(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that no Partial value leaves the program; a part of a program may pass one to another part."""
    output = graph.output_node()
    for value, spec in zip(_results(output), meta(output).results, strict=False):
        if isinstance(meta(value).placement, Partial) and not isinstance(spec, StageValue):
            yield value, "leaves the program as a Partial value"


@_holds(Level.EXPLICIT)
def _decompositions_are_expanded(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that no op is left that was placed as a decomposition."""
    for node in graph.nodes:
        if meta(node).decomposition is not None:
            yield node, "was placed as several ops and is still one"


@_holds(Level.LOCAL)
def _sizes_are_own(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that host integers come from the program's size inputs, not from captured shapes.

    A size that depends on data (as `nonzero`'s does) is read from the tensor that has this size.
    """
    for node in graph.nodes:
        type_ = meta(node).type
        read = isinstance(type_, ScalarType) and type_.expr.is_Symbol and read_from_rows(type_.expr)
        if read or not is_host_size(node):
            continue
        for source in node.all_input_nodes:
            if isinstance(meta(source).type, ScalarType):
                continue
            yield node, f"reads a size from the tensor %{source.name}"


@_holds(Level.EMITTED)
def _everything_is_executable(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that no redistribution (`ir/redistributions.py`) is left, and that no module is called."""
    for node in graph.nodes:
        if node.target in redistributions.REDISTRIBUTIONS:
            yield node, "is not lowered"
        elif node.op in ("call_module", "call_method"):
            yield node, f"is a {node.op}, which later stages do not run"
