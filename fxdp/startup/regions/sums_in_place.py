"""All-reduce buckets of gradients in place, instead of concatenating the gradients first.

    before    a, b -> cat -> all_reduce -> wait -> slices       each gradient is copied into a bucket
    after     a, b -> start_sums -> finish_sums                 each gradient stays a tensor of its own

Only for graphs that run op by op, between regions, and for ranks that read each other's memory
(`transport/direct_sums.py`). An in-place reduction overwrites its operands, so neither this graph nor a
view may read an operand's former value.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from fxdp.ir.network.transports import MESSAGE_BYTES
from fxdp.ir.op_kinds import is_view
from fxdp.ir.ops.packed_sums import finish_sums, start_sums
from fxdp.lowering.inductor.collective_order import communicates
from fxdp.startup.regions.between import calls_between
from fxdp.torch_compat import aten

_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
_CAT = aten.cat.default
_SLICE = aten.slice.Tensor


def sums_in_place(graph: fx.Graph) -> bool:
    """Return whether a graph starts or finishes in-place reductions: such a graph cannot be compiled."""
    return any(node.target in (start_sums, finish_sums) for node in graph.nodes)


def sum_in_place(graph: fx.Graph, group: str) -> bool:
    """Rewrite the buckets that `group` reduces if the gradients have no other readers; return if changed.

    Only buckets that run between regions are rewritten.

    before: `%all_reduce = all_reduce(cat([%a, %b]), sum, group)`, `%c = slice(wait(%all_reduce), 0, 0, 4)`
    after:  `%start = start_sums([%a, %b], group)`, `%c = finish_sums(%start)[0]`
    """
    between, changed = calls_between(graph), False
    for node in graph.find_nodes(op="call_function", target=_ALL_REDUCE):
        packed, kind, name = node.args
        if node not in between or (kind, name) != ("sum", group) or not _is_bucket(packed):
            continue
        (wait,), pieces = node.users, packed.args[0]
        parts = _parts_of(wait, pieces)
        if parts and all(map(_may_be_written, pieces)):
            _rewrite(graph, node, wait, parts, pieces)
            changed = True
    return changed


def _is_bucket(node: fx.Node) -> bool:
    """Return whether a node concatenates distinct flat values for one reduction, above message size."""
    if node.target is not _CAT or len(node.args) > 1 or len(node.users) > 1:
        return False
    pieces: Any = node.args[0]
    # a message is packed in any case
    return len({*pieces}) == len(pieces) and node.meta["val"].nbytes > MESSAGE_BYTES


def _parts_of(wait: fx.Node, pieces: Sequence[fx.Node]) -> list[fx.Node] | None:
    """Return the slices that undo the concatenation of `pieces`; None if the result is read differently."""
    ends = [*accumulate(piece.meta["val"].numel() for piece in pieces)]
    found = {_range(user, ends[-1]): user for user in wait.users}
    wanted = [*pairwise([0, *ends])]
    if found.keys() != {*wanted} or len(wait.users) != len(wanted):
        return None
    return [found[one] for one in wanted]


def _range(node: fx.Node, size: int) -> tuple[int, int] | None:
    """Return the bounds of a slice of a flat value with `size` elements; None for any other call."""
    if node.target is not _SLICE or len(node.args) != 4 or node.args[1] != 0:
        return None
    _, _, start, stop = node.args
    return (start, min(stop, size)) if type(start) is type(stop) is int and 0 <= start <= stop else None


def _may_be_written(piece: fx.Node) -> bool:
    """Return whether a flat value, and the value that it is a view of, is read by the reduction alone."""
    value = piece.meta["val"]
    if value.dim() != 1 or not value.is_contiguous() or len(piece.users) > 1:
        return False
    node = piece
    while is_view(node.target):
        node = node.all_input_nodes[0]
        if len(node.users) > 1 and not _are_apart(node):
            return False
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    return node.op == "call_function" and not communicates(source)


def _are_apart(node: fx.Node) -> bool:
    """Return whether all readers of a flat value read disjoint slices."""
    value = node.meta["val"]
    if value.dim() != 1:
        return False
    ranges = [_range(user, value.numel()) for user in node.users]
    known = sorted(one for one in ranges if one is not None)
    return len(known) == len(ranges) and all(a[1] <= b[0] for a, b in pairwise(known))


def _rewrite(
    graph: fx.Graph, start: fx.Node, wait: fx.Node, parts: Sequence[fx.Node], pieces: Sequence[fx.Node]
) -> None:
    values = [piece.meta["val"] for piece in pieces]
    with graph.inserting_before(start):
        begun = graph.call_function(start_sums, (list(pieces), start.args[2]))
        begun.meta["val"] = values[0].new_empty(0)
    with graph.inserting_before(wait):
        sums = graph.call_function(finish_sums, (begun,))
        sums.meta["val"] = values
    for place, part in enumerate(parts):
        with graph.inserting_before(part):
            full = graph.call_function(operator.getitem, (sums, place))
            full.meta["val"] = values[place]
        part.replace_all_uses_with(full)
        graph.erase_node(part)
    for node in (wait, start, start.args[0]):
        graph.erase_node(node)  # type: ignore[arg-type]
