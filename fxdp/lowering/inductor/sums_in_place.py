"""Buckets of gradients that are summed where the gradients lie, instead of being laid end to end first.

    before    a, b -> cat -> all_reduce -> wait -> slices       each gradient is copied, and lives in a bucket
    after     a, b -> start_sums -> finish_sums                 each is its own tensor, as without other ranks

Only for what runs op by op, between segments, and where ranks read each other's values where they lie
(`ranks/comms/direct_sums.py`). A sum writes into its terms, so nobody may read one of them as it was: neither
in this graph, nor by a view of it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from fxdp.ir.op_kinds import is_view
from fxdp.ir.ops.packed_sums import finish_sums, start_sums
from fxdp.ir.transports import MESSAGE_BYTES
from fxdp.lowering.inductor.between import calls_between
from fxdp.lowering.inductor.collective_order import communicates
from fxdp.torch_compat import aten

_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
_CAT = aten.cat.default
_SLICE = aten.slice.Tensor


def sums_in_place(graph: fx.Graph) -> bool:
    """Whether a graph starts such sums, or waits for them: it cannot be compiled."""
    return any(node.target in (start_sums, finish_sums) for node in graph.nodes)


def sum_in_place(graph: fx.Graph, group: str) -> bool:
    """Rewrite the buckets that are summed by `group`, where nobody reads their gradients otherwise.

    Those alone that stand between segments; whether there are any.

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
    """Whether different flat values are put end to end for a sum alone, and are more than a message."""
    if node.target is not _CAT or len(node.args) > 1 or len(node.users) > 1:
        return False
    pieces: Any = node.args[0]
    # a message is put together in any case
    return len({*pieces}) == len(pieces) and node.meta["val"].nbytes > MESSAGE_BYTES


def _parts_of(wait: fx.Node, pieces: Sequence[fx.Node]) -> list[fx.Node] | None:
    """The slices that take the sums apart again as they were put together; None if it is read otherwise."""
    ends = [*accumulate(piece.meta["val"].numel() for piece in pieces)]
    found = {_range(user, ends[-1]): user for user in wait.users}
    wanted = [*pairwise([0, *ends])]
    if found.keys() != {*wanted} or len(wait.users) != len(wanted):
        return None
    return [found[one] for one in wanted]


def _range(node: fx.Node, size: int) -> tuple[int, int] | None:
    """From where to where a call slices a flat value of so many elements; None if it does something else."""
    if node.target is not _SLICE or len(node.args) != 4 or node.args[1] != 0:
        return None
    _, _, start, stop = node.args
    return (start, min(stop, size)) if type(start) is type(stop) is int and 0 <= start <= stop else None


def _may_be_written(piece: fx.Node) -> bool:
    """Whether a flat value is read for the sum alone, and so is what it shows."""
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
    """Whether all that read a flat value read parts of it that have no element in common."""
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
