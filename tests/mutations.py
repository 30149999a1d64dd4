"""Wrong programs, one change each, that the oracle must tell from the right one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.graph_text import target_text
from fxdp.ir.graph.graphs import copy_graph
from fxdp.ir.graph.metadata import is_host_size, meta
from fxdp.ir.graph.signature import Size
from fxdp.ir.types.sizes import batch_factor
from fxdp.ir.types.value_types import ScalarType, TensorType


@dataclass(frozen=True)
class Mutant:
    """A changed program, and what was changed."""

    gm: fx.GraphModule
    what: str


def without_each_reduction(gm: fx.GraphModule) -> Iterator[Mutant]:
    """An all-reduce hands on each rank's own term, a reduce-scatter each rank's part of its own term."""
    for node in gm.graph.nodes:
        if node.target not in (redistributions.all_reduce, redistributions.reduce_scatter):
            continue
        mutant, twin = _copy(gm, node)
        if twin.target is redistributions.all_reduce:
            twin.target, twin.args = redistributions.wait, twin.args[:1]
        else:
            twin.target, twin.args = redistributions.shard, twin.args[:3]
        yield Mutant(mutant, f"no {target_text(node.target)} of %{node.args[0].name}")


def with_each_size_flipped(gm: fx.GraphModule) -> Iterator[Mutant]:
    """One op counts the local batch instead of the global one, or the other way round."""
    for node in gm.graph.nodes:
        if is_host_size(node) or node.op != "call_function":
            continue
        for size in node.all_input_nodes:
            if isinstance(meta(size).type, ScalarType) and _slots_of(size) & {"B", "b"}:
                mutant, twin = _copy(gm, node)
                old = next(n for n in twin.all_input_nodes if n.name == size.name)
                twin.replace_input_with(old, _flipped(mutant.graph, old, twin))
                yield Mutant(mutant, f"{target_text(node.target)} %{node.name} with %{size.name} flipped")


def with_each_dim_swapped(gm: fx.GraphModule) -> Iterator[Mutant]:
    """A gather, scatter or slice along another dim; a dim without the batch is no candidate."""
    for node in gm.graph.nodes:
        if node.target not in (
            redistributions.all_gather,
            redistributions.reduce_scatter,
            redistributions.shard,
        ):
            continue
        type_ = meta(node).type
        assert isinstance(type_, TensorType)
        for dim, size in enumerate(type_.shape):
            if dim != node.args[1] and batch_factor(size) is not None:
                mutant, twin = _copy(gm, node)
                twin.args = (twin.args[0], dim, *twin.args[2:])
                yield Mutant(mutant, f"{target_text(node.target)} %{node.name} along {dim}")


def _copy(gm: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, fx.Node]:
    mutant = copy_graph(gm)
    return mutant, next(n for n in mutant.graph.nodes if n.name == node.name)


def _slots_of(size: fx.Node) -> set[str]:
    spec = meta(size).spec
    if isinstance(spec, Size):
        return {spec.name}
    return set().union(*(_slots_of(n) for n in size.all_input_nodes)) if is_host_size(size) else set()


def _flipped(graph: fx.Graph, size: fx.Node, before: fx.Node) -> fx.Node:
    spec = meta(size).spec
    if isinstance(spec, Size):
        other = {"B": "b", "b": "B"}.get(spec.name, spec.name)
        return next(n for n in graph.nodes if meta(n).spec == Size(other))
    if not is_host_size(size):
        return size
    operands = {n: _flipped(graph, n, before) for n in size.all_input_nodes}
    with graph.inserting_before(before):
        return graph.node_copy(size, operands.__getitem__)
