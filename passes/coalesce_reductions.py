"""Let small sums that are under way at the same time travel as one all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import fx

from fxdp.ir import conversions
from fxdp.ir.level import Level
from fxdp.ir.mesh import Mesh
from fxdp.ir.notes import Cause, Reason, note
from fxdp.ir.placements import P, Placement, R
from fxdp.ir.types import TensorType

aten = torch.ops.aten

_Key: TypeAlias = "tuple[torch.dtype, bool]"


def groups(graph: fx.Graph, limit: int) -> Iterator[list[fx.Node]]:
    """All-reduces of at most `limit` bytes of which none is waited for before the last is started.

        all_reduce a, all_reduce b, wait a, wait b, all_reduce c, wait c   ->   [a, b]
    """
    started: dict[_Key, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is conversions.all_reduce and _is_small(node, limit):
            started.setdefault(_key(node), []).append(node)
        elif node.target is conversions.wait:
            for key, members in started.items():
                if node.args[0] in members:
                    yield from _several(started.pop(key))
                    break


def _several(members: list[fx.Node]) -> Iterator[list[fx.Node]]:
    if len(members) > 1:
        yield members


def _is_small(node: fx.Node, limit: int) -> bool:
    """A sum of fixed and small size that is no bucket of gradients."""
    known = note(node)
    if node.args[1] != "sum" or node.kwargs or (known.reason is not None and known.reason.rule == "bucket"):
        return False
    type_ = _type(node)
    return all(isinstance(n, int) for n in type_.shape) and _elements(node) * type_.dtype.itemsize <= limit


def _key(node: fx.Node) -> _Key:
    return _type(node).dtype, note(node).backward


def _type(node: fx.Node) -> TensorType:
    type_ = note(node).type
    assert isinstance(type_, TensorType)
    return type_


def _elements(node: fx.Node) -> int:
    return prod(int(n) for n in _type(node).shape)


def _coalesce(graph: fx.Graph, members: list[fx.Node]) -> None:
    """Replace the all-reduces by one, started where the last was and waited for where the first was."""
    waits = [next(iter(member.users)) for member in members]
    dtype, backward = _key(members[0])
    with graph.inserting_after(members[-1]):
        anchor = graph.call_function(aten.cat.default, ([],))
    with graph.inserting_before(anchor):
        flats = []
        for member in members:
            value = member.args[0]
            flat = graph.call_function(aten.reshape.default, (value, [_elements(member)]))
            flats.append(_describe(flat, TensorType(dtype, (_elements(member),)), P, backward))
    anchor.args = (flats,)
    total = TensorType(dtype, (sum(map(_elements, members)),))
    _describe(anchor, total, P, backward)
    with graph.inserting_after(anchor):
        pending = graph.call_function(conversions.all_reduce, (anchor, "sum"))
    _describe(pending, total, R, backward, operands=(P,))
    note(pending).cause = _cause(members)
    with graph.inserting_before(_first(graph, waits)):
        done = _describe(graph.call_function(conversions.wait, (pending,)), total, R, backward)
        start = 0
        for member, wait in zip(members, waits, strict=True):
            stop = start + _elements(member)
            part = graph.call_function(aten.slice.Tensor, (done, 0, start, stop))
            _describe(part, TensorType(dtype, (stop - start,)), R, backward)
            whole = graph.call_function(aten.view.default, (part, list(_type(member).shape)))
            wait.replace_all_uses_with(_describe(whole, _type(member), R, backward))
            start = stop
    for node in (*waits, *members):
        graph.erase_node(node)


def _first(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
    position = {node: i for i, node in enumerate(graph.nodes)}
    return min(nodes, key=position.__getitem__)


def _describe(
    node: fx.Node,
    type_: TensorType,
    placement: Placement,
    backward: bool,
    operands: tuple[Placement, ...] | None = None,
) -> fx.Node:
    known = note(node)
    known.type, known.placement, known.backward = type_, placement, backward
    count = len(node.args[0]) if isinstance(node.args[0], (list, tuple)) else 1
    known.operands = operands or (placement,) * count
    known.reason = Reason("coalesce")
    return node


def _cause(members: list[fx.Node]) -> Cause:
    causes = [cause for member in members if (cause := note(member).cause) is not None]
    text = f"{len(members)} sums: {'; '.join(dict.fromkeys(cause.text for cause in causes))}"
    return Cause(causes[0].consumer, causes[0].producer, causes[0].site, text)


@dataclass(frozen=True)
class CoalesceReductions:
    """After it no two small sums of a dtype are under way at the same time: they travel together.

    before: `all_reduce(%loss_sum)`, `all_reduce(%count)`, and their two waits
    after:  `all_reduce(%cat)` of both, one wait, and the two values cut out of it

    Small messages cost their latency, not their bytes: BatchNorm's backward sums, or a loss and its
    token count.

    Parameters
    ----------
    limit : bytes of a value that counts as small.
    """

    limit: int = 64 * 1024

    name = "coalesce-reductions"
    requires = Level.LOCAL
    ensures = Level.LOCAL

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        if mesh.size > 1:
            for members in list(groups(gm.graph, self.limit)):
                _coalesce(gm.graph, members)
        return gm
