"""Shard the parameters, and ask for their gradients in shards."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from fxdp.ir.graph.graphs import inputs_of
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import copy_meta, meta, tensor_type
from fxdp.ir.graph.signature import Gradient, Parameter
from fxdp.ir.op_kinds import is_view
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import ParamShard
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import aten

_RULE = "rows"

_CHEAP = (
    aten.clone.default,
    aten._to_copy.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.chunk.default,
    operator.getitem,
)


def _is_sharded(type_: object) -> bool:
    """Return whether a parameter of this type is sharded: a tensor without dims is replicated."""
    return isinstance(type_, TensorType) and len(type_.shape) > 0


def _is_rematerializable(node: fx.Node, rematerialized: set[fx.Node]) -> bool:
    """Return whether a node is a view or a cast of parameters alone, which is cheap to recompute."""
    if node.op != "call_function" or not (node.target in _CHEAP or is_view(node.target)):
        return False
    sources = node.all_input_nodes
    return bool(sources) and all(source in rematerialized for source in sources)


def _cast_in_rows(graph: fx.Graph, parameters: Iterable[fx.Node], rows: ParamShard) -> list[fx.Node]:
    """Let casts to fewer bytes run on local shards, so that the all-gather moves the cast values.

    A parameter that is also read uncast, or in several dtypes, is gathered uncast. The casts move
    to the top of the graph.

    Returns
    -------
    list[fx.Node] : the casts that now read local shards.
    """
    found = []
    for parameter in parameters:
        users = list(parameter.users)
        own, dtypes = tensor_type(parameter).dtype, {_narrower(user, parameter) for user in users}
        if len(dtypes) != 1 or dtypes & {None, own}:
            continue
        for user in users:
            meta(user).placement, meta(user).operands = rows, (rows,)
            meta(user).reason = _RULE
        found += users
    top = next(node for node in graph.nodes if node.op != "placeholder")
    for cast in found:
        top.prepend(cast)
    return found


def _narrower(user: fx.Node, parameter: fx.Node) -> torch.dtype | None:
    """Return the dtype to which a node casts a parameter, if that dtype has fewer bytes, else None."""
    if user.target is not aten._to_copy.default:
        return None
    dtype = tensor_type(user).dtype
    return dtype if dtype.itemsize < tensor_type(parameter).dtype.itemsize else None


def _repeat_in_backward(graph: fx.Graph, parameters: set[fx.Node]) -> None:
    """Recompute views of parameters in the backward: the forward's views would keep full values in memory."""
    rematerialized, again = set(parameters), dict[fx.Node, fx.Node]()
    for node in list(graph.nodes):
        if _is_rematerializable(node, rematerialized) and not meta(node).backward:
            rematerialized.add(node)
        elif meta(node).backward and node.op == "call_function":
            for source in node.all_input_nodes:
                if source in rematerialized and source not in parameters:
                    node.replace_input_with(source, _again(graph, source, node, parameters, again))


def _again(
    graph: fx.Graph, node: fx.Node, user: fx.Node, parameters: set[fx.Node], made: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Copy a node derived from parameters, and its sources, before its first user in the backward."""
    if node in parameters:
        return node
    if node not in made:
        sources = {s: _again(graph, s, user, parameters, made) for s in node.all_input_nodes}
        with graph.inserting_before(user):
            made[node] = graph.node_copy(node, sources.__getitem__)
        copy_meta(node, made[node], backward=True)
    return made[node]


@dataclass(frozen=True)
class PlaceParameters:
    """Shard parameters between their uses, and ask for their gradients as local shards.

    before: `%w: f32[33, 8] {dp=R} = param(w)`       returns `gradient param(w)=%mm` as R
    after:  `%w: f32[33, 8] {dp=Rows} = param(w)`    returns `gradient param(w)=%mm` as Rows

    Operations still need the full parameter, so `insert-collectives` inserts the all-gathers and
    reduce-scatters. Views of a parameter that the backward reads are recomputed there, from the backward's
    own all-gather. A cast to fewer bytes reads the local shard, before the all-gather.

    Parameters
    ----------
    unsharded_once : full values stay from the forward to the backward, which then gathers none.
    kept : names of the parameters whose full values stay when `unsharded_once` is False.
    """

    unsharded_once: bool = False
    kept: frozenset[str] = frozenset()

    name = "place-parameters"
    requires = Level.PLACED
    ensures = Level.PLACED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Annotate the graph in place."""
        rows = ParamShard(mesh.shard_axis)
        data_ranks = mesh.size_along(rows.axis)
        if data_ranks * mesh.pipeline.size == 1:
            return gm
        every = inputs_of(gm.graph, Parameter)
        parameters = {spec: node for spec, node in every if _is_sharded(meta(node).type)}
        for node in parameters.values():
            meta(node).placement = rows
        casts = _cast_in_rows(gm.graph, parameters.values(), rows)
        output = meta(gm.graph.output_node())
        if data_ranks > 1:  # else pipeline ranks slice their shards from the full gradient
            output.operands = tuple(
                rows if isinstance(spec, Gradient) and spec.of in parameters else wanted
                for spec, wanted in zip(output.results, output.operands, strict=True)
            )
        if not self.unsharded_once:
            own = {node for spec, node in parameters.items() if spec.name not in self.kept}
            _repeat_in_backward(gm.graph, own | {cast for cast in casts if cast.all_input_nodes[0] in own})
        return gm
