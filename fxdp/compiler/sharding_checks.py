"""Invariants of a program that all-gathers sharded parameters and reduce-scatters gradients.

a cast of w to fewer bytes, then the gather          EXPLICIT: no wider dtype travels than is read
gather a, gather b reads gather a, ..                LOCAL, scheduled: one order, with every compiler
tangent, a gather of the backward reads the tangent  LOCAL, scheduled: the forward's gather is not reused
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.graphs import inputs_of, reachable
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.graph.signature import Tangent
from fxdp.torch_compat import aten

_Fault = tuple[fx.Node, str]

_CAST = aten._to_copy.default


def _casts_come_before_all_gathers(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that a parameter that all readers cast to one narrower dtype is cast before the all-gather.

    Holds from EXPLICIT on.
    """
    for parameter in graph.find_nodes(op="placeholder"):
        starts = [u for u in parameter.users if u.target is redistributions.all_gather_shards]
        if not starts:
            continue
        readers = [r for s in starts for u in s.users if u.target is redistributions.wait for r in u.users]
        others = [user for user in parameter.users if user not in starts]
        dtypes = {tensor_type(r).dtype if r.target is _CAST else None for r in (*readers, *others)}
        if len(dtypes) == 1 and (dtype := dtypes.pop()) is not None:
            own = tensor_type(parameter).dtype
            if dtype.itemsize < own.itemsize:
                yield starts[0], f"gathers %{parameter.name} as {own}, which is read as {dtype} alone"


def _parameter_buckets_start_in_one_order(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that each scheduled start reads the previous start of the phase, so that no compiler swaps both.

    Holds from LOCAL on.
    """
    last: dict[bool, fx.Node] = {}
    for node in _scheduled(graph):
        before = last.get(meta(node).backward)
        if before is not None and before not in node.args[2]:  # type: ignore[operator]
            yield node, f"may start before %{before.name}"
        last[meta(node).backward] = node


def _all_gathers_of_the_backward_read_a_tangent(graph: fx.Graph) -> Iterator[_Fault]:
    """Check that each scheduled all-gather of the backward depends on a tangent.

    Otherwise a compiler may reuse the forward's full value. Holds from LOCAL on.
    """
    gathers = [
        n for n in _scheduled(graph) if n.target is redistributions.all_gather_shards and meta(n).backward
    ]
    if not gathers:
        return  # most programs have none, and `reachable` would visit all of the backward
    later = reachable([node for _, node in inputs_of(graph, Tangent)])
    for node in gathers:
        if node not in later:
            yield node, "is of the backward, but depends on no tangent"


def _scheduled(graph: fx.Graph) -> list[fx.Node]:
    """Return the starts of buckets in order, or nothing if prefetch has not been scheduled yet."""
    starts = [n for n in graph.nodes if n.target in redistributions.ORDERED and len(n.args) > 2]
    return starts if any(node.args[2] for node in starts) else []


SHARDING_CHECKS = {
    Level.EXPLICIT: (_casts_come_before_all_gathers,),
    Level.LOCAL: (_parameter_buckets_start_in_one_order, _all_gathers_of_the_backward_read_a_tangent),
}
"""The checks by the first level at which they hold; emission lowers the nodes that they read."""
