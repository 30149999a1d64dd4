"""Combine small all-reduces that are in flight at the same time into one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import Cause, members_of, meta, tensor_type
from fxdp.ir.graph.packing import Packing, elements
from fxdp.ir.graph.parameter_buckets import causes_of
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.value_types import is_static, type_bytes

_Key: TypeAlias = "tuple[torch.dtype, bool, str | None]"
"""Key of the all-reduces that may be combined: dtype, phase (True: backward), mesh axis."""


def _groups(graph: fx.Graph, limit: int) -> Iterator[list[fx.Node]]:
    """Yield groups of all-reduces of at most `limit` bytes that are all started before the first one's wait.

    all_reduce a, all_reduce b, wait a, wait b, all_reduce c, wait c   ->   [a, b]
    """
    started: dict[_Key, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is redistributions.all_reduce and _is_small(node, limit):
            started.setdefault(_key(node), []).append(node)
        elif node.target is redistributions.wait:
            for key, members in started.items():
                if node.args[0] in members:
                    del started[key]
                    yield from [members] if len(members) > 1 else []
                    break


def _is_small(node: fx.Node, limit: int) -> bool:
    """Return whether an all-reduce is a static sum of at most `limit` bytes, and no gradient bucket."""
    known = meta(node)
    if node.args[1] != "sum" or known.reason == "bucket":
        return False
    type_ = tensor_type(node)
    return is_static(type_) and type_bytes(type_) <= limit


def _key(node: fx.Node) -> _Key:
    return tensor_type(node).dtype, meta(node).backward, redistributions.axis_of(node)


def _coalesce(graph: fx.Graph, members: list[fx.Node]) -> None:
    """Replace all-reduces by one that starts where the last did, with a wait where the first wait was."""
    waits = [next(iter(member.users)) for member in members]
    _, backward, axis = _key(members[0])
    packing = Packing(graph, "coalesce", backward, axis)
    with graph.inserting_before(members[-1].next):
        flats = [packing.flat(member.args[0]) for member in members]  # type: ignore[arg-type]
        pending = packing.reduce(packing.side_by_side(flats), _cause(members))
    with graph.inserting_before(_first(graph, waits)):
        done, start = packing.wait(pending), 0
        for member, wait in zip(members, waits, strict=True):
            stop = start + elements(tensor_type(member))
            part = packing.piece(done, start, stop)
            wait.replace_all_uses_with(packing.shaped(part, tensor_type(member)))
            start = stop
    for node in (*waits, *members):
        graph.erase_node(node)


def _first(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
    position = {node: i for i, node in enumerate(graph.nodes)}
    return min(nodes, key=position.__getitem__)


def _cause(members: list[fx.Node]) -> Cause:
    causes = causes_of(members)
    text = f"{len(members)} sums: {'; '.join(dict.fromkeys(cause.text for cause in causes))}"
    first = causes[0]
    return Cause(first.consumer, first.producer, first.location, text, members=members_of(causes))


@dataclass(frozen=True)
class CoalesceReductions:
    """Combine small all-reduces of one dtype that would be in flight at the same time.

    before: `all_reduce(%loss_sum)`, `all_reduce(%count)`, and their two waits
    after:  `all_reduce(%cat)` of both, one wait, and the two values sliced from its result

    The cost of a small message is latency, not bytes. Examples are BatchNorm's backward sums, or a
    loss and its token count.

    Parameters
    ----------
    limit : largest size in bytes of a value that counts as small.
    """

    limit: int = 64 * 1024

    name = "coalesce-reductions"
    requires = Level.LOCAL
    ensures = Level.LOCAL

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        if mesh.size > 1:
            for members in list(_groups(gm.graph, self.limit)):
                _coalesce(gm.graph, members)
        return gm
