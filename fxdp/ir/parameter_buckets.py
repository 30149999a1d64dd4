"""Buckets of rows as they stand in a graph: what a gather starts, and the values that are cut out of it.

    %all_gather_shards = all_gather_shards([%w, %b], (20, 5), ())      the start, which reads rows
    %wait = wait(%all_gather_shards)                             the flat value
    %slice = slice(%wait, 0, 0, 40)                        pieces: of each value a slice and a view of it,
    %view = view(%slice, [5, 8])                           in the order of what the start reads

Without buckets a start reads the rows of one parameter, and its wait is all of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.metadata import Cause, members_of, meta
from fxdp.ir.op_kinds import is_view
from fxdp.ir.signature import Parameter


def gather_starts(graph: fx.Graph, *, backward: bool) -> list[fx.Node]:
    """What starts gathers of a phase, in order."""
    found = graph.find_nodes(op="call_function", target=redistributions.all_gather_shards)
    return [node for node in found if meta(node).backward is backward]


def wait_of(start: fx.Node) -> fx.Node:
    """The wait for a start."""
    return next(user for user in start.users if user.target is redistributions.wait)


def scatter_steps(start: fx.Node) -> list[fx.Node]:
    """The start of a sum of gradients, and the redistributions and waits that follow it."""
    found = [start, wait_of(start)]
    following = list(found[-1].users)
    # on two axes the rows are summed along the other one next
    if len(following) == 1 and following[0].target is redistributions.all_reduce_shards:
        found += [following[0], wait_of(following[0])]
    return found


def pieces(flat: fx.Node) -> set[fx.Node]:
    """The slices and views that are cut out of a bucket's flat value."""
    return {view for piece in flat.users for view in piece.users} | set(flat.users)


def readers(value: fx.Node) -> set[fx.Node]:
    """The ops that read a value, or read it through views of it."""
    found = set[fx.Node]()
    for user in value.users:
        found |= readers(user) if is_view(user.target) and user.users else {user}
    return found


def unsharded_parameters(start: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of what a start reads, a parameter or a cast of it, and its full value."""
    read, done = start.args[0], wait_of(start)
    if isinstance(read, fx.Node):
        return [(read, done)]
    assert isinstance(read, Sequence)
    views = [view for piece in done.users for view in piece.users]
    return list(zip(read, views, strict=True))  # type: ignore[arg-type]


def parameter_of(rows: fx.Node) -> Parameter:
    """The parameter whose rows a gather reads, as they are or in another dtype."""
    spec = rows_of(rows)
    assert spec is not None
    return spec


def rows_of(node: fx.Node) -> Parameter | None:
    """The parameter whose rows a value is, as they are or in another dtype; None for rows of a gradient."""
    if node.target is redistributions.slice_shard:
        node = _gathered(node)
    spec = meta(node if node.op == "placeholder" else node.all_input_nodes[0]).spec
    return spec if isinstance(spec, Parameter) else None


def _gathered(part: fx.Node) -> fx.Node:
    """What was gathered to the full value of which these are rows; they themselves if nothing was."""
    full, start = part.all_input_nodes[0], part.all_input_nodes[0]
    while start.op == "call_function" and (is_view(start.target) or start.target is redistributions.wait):
        start = start.all_input_nodes[0]
    if start.target is not redistributions.all_gather_shards:
        return part
    return next(read for read, value in unsharded_parameters(start) if value is full)


def gathers_cause(starts: Sequence[fx.Node]) -> Cause:
    """Why gathers of a parameter each travel together: the parameters, and the op that first needs one."""
    causes = causes_of(starts)
    names = [parameter_of(start.args[0]).name for start in starts]  # type: ignore[arg-type]
    listed = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return replace(causes[0], text=f"{listed} for {causes[0].text}", members=members_of(causes))


def gradients_cause(causes: Sequence[Cause]) -> Cause:
    """The same for sums of gradients, of which these are the causes."""
    first, last = causes[0], causes[-1]
    if len(causes) == 1:
        return first
    text = f"{len(causes)} gradients: {first.text} to {last.text.removeprefix('gradient of ')}"
    return replace(first, text=text, members=members_of(causes))


def causes_of(starts: Sequence[fx.Node]) -> list[Cause]:
    """Why each of these travels, where that is known."""
    return [cause for start in starts if (cause := meta(start).cause) is not None]
