"""Refuse bags of varying lengths in one flat tensor, with offsets at which the bags begin.

    F.embedding_bag(x, table, offsets)
    rank 0: x = [7, 3, 9], offsets = [0, 2]      the batch: x = [7, 3, 9, 4, 8]
    rank 1: x = [4, 8],    offsets = [0, 1]                 offsets = [0, 2, 0, 1], expected [0, 2, 3, 4]

Each rank counts from the start of its own flat tensor, so concatenated offsets of several ranks are wrong.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxdp.capture.locations import Origin
from fxdp.errors import InputError
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Input
from fxdp.ir.types.sizes import mentions_batch
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import aten

_BAGS = frozenset({aten._embedding_bag.default, aten._embedding_bag_forward_only.default})
_MOVES = frozenset({
    aten._to_copy.default, aten.alias.default, aten.clone.default, aten.select.int, aten.slice.Tensor,
    aten.squeeze.dim, aten.view.default,
})  # fmt: skip
"""Ops that pass on the caller's values; offsets that ops compute from lengths are global and correct."""


def check_bags(graph: fx.Graph, origin: Origin) -> None:
    """Raise if offsets are sharded over ranks, or split into micro-batches.

    Raises
    ------
    InputError : with the input, the line and the remedy.
    """
    for node in graph.nodes:
        if node.target not in _BAGS:
            continue
        entries, offsets = _source(node.args[1]), _source(node.args[2])
        spec = meta(offsets).spec
        if isinstance(spec, Input) and _is_divided(offsets) and _is_divided(entries):
            location = origin.of(meta(node).location)
            raise InputError(
                f"{spec.path or offsets.name} has the offsets of bags at {location}: "
                "the batch is ragged, and each rank counts from its own beginning. Say in batch_dims= "
                "fxdp.Rows('values') of the input and fxdp.Rows('bags', starts='values') of the offsets; or "
                "pass bags of one length, [batch, length] with a padding_idx and without offsets, or lengths "
                "in their place, of which the model computes offsets = lengths.cumsum(0) - lengths"
            )


def _source(value: Any) -> fx.Node:
    node: fx.Node = value
    while node.target in _MOVES:
        node = node.all_input_nodes[0]
    return node


def _is_divided(node: fx.Node) -> bool:
    """Return whether each rank holds only a part of a value."""
    type_ = meta(node).type
    return isinstance(type_, TensorType) and any(map(mentions_batch, type_.shape))
