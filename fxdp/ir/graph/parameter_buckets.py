"""Parameter buckets in a graph: one all-gather, from whose result the full values are sliced.

    %all_gather_shards = all_gather_shards([%w, %b], (20, 5), ())      the start, which reads rows
    %wait = wait(%all_gather_shards)                             the flat value
    %slice = slice(%wait, 0, 0, 40)                        pieces: of each value a slice and a view of it,
    %view = view(%slice, [5, 8])                           in the order of the start's operands

Without buckets a start reads the local shard of one parameter, and the wait returns the full value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import Cause, members_of, meta
from fxdp.ir.graph.signature import Parameter
from fxdp.ir.op_kinds import is_view


def gather_starts(graph: fx.Graph, *, backward: bool) -> list[fx.Node]:
    """Return the starts of the all-gathers of a phase, in order."""
    found = graph.find_nodes(op="call_function", target=redistributions.all_gather_shards)
    return [node for node in found if meta(node).backward is backward]


def wait_of(start: fx.Node) -> fx.Node:
    """Return the wait for a start."""
    return next(user for user in start.users if user.target is redistributions.wait)


def scatter_steps(start: fx.Node) -> list[fx.Node]:
    """Return the start of a gradient's reduce-scatter, and the redistributions and waits that follow."""
    found = [start, wait_of(start)]
    following = list(found[-1].users)
    # with two axes, the shards are reduced along the second one next
    if len(following) == 1 and following[0].target is redistributions.all_reduce_shards:
        found += [following[0], wait_of(following[0])]
    return found


def pieces(flat: fx.Node) -> set[fx.Node]:
    """Return the slices and views of a bucket's flat value."""
    return {view for piece in flat.users for view in piece.users} | set(flat.users)


def readers(value: fx.Node) -> set[fx.Node]:
    """Return the ops that read a value, directly or through views."""
    found = set[fx.Node]()
    for user in value.users:
        found |= readers(user) if is_view(user.target) and user.users else {user}
    return found


def unsharded_parameters(start: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return pairs of an operand of a start (a parameter or a cast) and the full value."""
    read, done = start.args[0], wait_of(start)
    if isinstance(read, fx.Node):
        return [(read, done)]
    assert isinstance(read, Sequence)
    views = [view for piece in done.users for view in piece.users]
    return list(zip(read, views, strict=True))  # type: ignore[arg-type]


def parameter_of(rows: fx.Node) -> Parameter:
    """Return the parameter of an all-gather, which reads the local shard or a cast."""
    spec = rows_of(rows)
    assert spec is not None
    return spec


def rows_of(node: fx.Node) -> Parameter | None:
    """Return the parameter whose local shard, or its cast, a value is; None for a gradient shard."""
    if node.target is redistributions.slice_shard:
        node = _gathered(node)
    spec = meta(node if node.op == "placeholder" else node.all_input_nodes[0]).spec
    return spec if isinstance(spec, Parameter) else None


def _gathered(part: fx.Node) -> fx.Node:
    """Return the operand of the all-gather whose full value a shard was sliced from, else the shard."""
    full, start = part.all_input_nodes[0], part.all_input_nodes[0]
    while start.op == "call_function" and (is_view(start.target) or start.target is redistributions.wait):
        start = start.all_input_nodes[0]
    if start.target is not redistributions.all_gather_shards:
        return part
    return next(read for read, value in unsharded_parameters(start) if value is full)


def gathers_cause(starts: Sequence[fx.Node]) -> Cause:
    """Return the cause of a bucket of all-gathers: the parameters, and the op that first needs one."""
    causes = causes_of(starts)
    names = [parameter_of(start.args[0]).name for start in starts]  # type: ignore[arg-type]
    listed = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return replace(causes[0], text=f"{listed} for {causes[0].text}", members=members_of(causes))


def gradients_cause(causes: Sequence[Cause]) -> Cause:
    """Return the cause of a bucket of gradient reductions with these causes."""
    first, last = causes[0], causes[-1]
    if len(causes) == 1:
        return first
    text = f"{len(causes)} gradients: {first.text} to {last.text.removeprefix('gradient of ')}"
    return replace(first, text=text, members=members_of(causes))


def causes_of(starts: Sequence[fx.Node]) -> list[Cause]:
    """Return the known causes of these collectives."""
    return [cause for start in starts if (cause := meta(start).cause) is not None]
