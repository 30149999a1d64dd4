"""Which values are row numbers of an axis, and on each rank of its own rows alone.

That is so of inputs by contract (`fxdp.Rows(into=)`), checked at each call, and passes through ops that only
move elements; arithmetic loses it. Values that lost it are global row numbers all the same: reads gather.

    edge_index                     into nodes       by contract
    edge_index[0], cat(a, b)       into nodes       moved
    graph_of[edge_index[0]]        into graphs      read at rows of the rank's own
    edge_index + 1                 unknown
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from fxdp.ir.graph.metadata import meta
from fxdp.ir.ops.library import aten
from fxdp.ir.types.placements import R, Shard
from fxdp.ir.types.value_types import TensorType
from fxdp.placing.op_view import op_view
from fxdp.placing.selections import SelectedRows
from fxdp.rules.registry import Operand, Pointer, registry

_MOVES = frozenset({
    aten.alias.default, aten.clone.default, aten.detach.default, aten._to_copy.default,
    aten.lift_fresh_copy.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default,
    aten.expand.default, aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int,
    aten.cat.default, aten.stack.default, aten.repeat.default, aten.where.self, aten.flip.default,
    aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default,
})  # fmt: skip
"""Ops whose results are elements of their integer operands."""
READS = frozenset({aten.index_select.default, aten.gather.default, aten.index.Tensor})
"""Ops whose results are elements of the first operand."""


def pointer_of(
    node: fx.Node, known: Mapping[fx.Node, Pointer], selections: SelectedRows | None = None
) -> Pointer | None:
    """Return where the values of a node point, from what is known of earlier nodes."""
    moved = [] if may_round(node) else moved_operands(node)
    facts = [known[source] for source in moved if source in known]
    if not moved or len(facts) < len(moved) or len({fact.size for fact in facts}) != 1:
        return None
    shard = moved_shard(node, {source: known[source].shard for source in moved}, known, selections)
    return None if shard is None else facts[0]._replace(shard=shard)


def moved_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands of which all elements of a node's result are; empty for an op that computes."""
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    if node.target not in _MOVES | READS:
        return []
    sources = [s for s in node.all_input_nodes if isinstance(meta(s).type, TensorType)]
    return sources[:1] if node.target in READS else sources[node.target is aten.where.self :]


def moved_shard(
    node: fx.Node,
    shards: Mapping[fx.Node, Shard],
    known: Mapping[fx.Node, Pointer],
    selections: SelectedRows | None = None,
) -> Shard | None:
    """Return the shard of a node's result that comes from these shards of its operands, rank by rank.

    The op's own rule says whether each rank's part of the result comes from its parts of the operands.
    `known` says of what an operand's values are row numbers, `selections` which masks select rows.
    """
    place = 0
    if node.target is operator.getitem:
        node, place = node.args  # type: ignore[assignment]

    def operand(index: int, source: fx.Node) -> Operand:
        type_, fact = meta(source).type, known.get(source)
        assert isinstance(type_, TensorType)
        shard = shards.get(source, R if fact is None else fact.shard)
        if selections is None:
            return Operand(index, type_, (shard,), fact)
        mask = selections.shard_of(source)
        return Operand(index, type_, (mask or shard,), fact, selects=selections.axes_of(source))

    op, _ = op_view(node, operand)
    wanted = {o.index: shard for o in op.operands if isinstance(shard := o.placements[0], Shard)}
    for alternative in registry[op.target].rule(op):
        result = alternative.outputs[place]
        if isinstance(result, Shard) and all(alternative.inputs[i] == shard for i, shard in wanted.items()):
            return result
    return None


def may_round(node: fx.Node) -> bool:
    """Return whether a node's dtype is none that holds each row number of an axis."""
    type_ = meta(node).type
    if not isinstance(type_, TensorType):
        return True
    return type_.dtype.is_floating_point or type_.dtype.is_complex or type_.dtype.itemsize < 4
