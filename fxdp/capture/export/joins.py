"""Tensors that the user's code takes apart sample by sample and joins again, as one op.

    unbind: x[0], x[1], ..., x[b - 1]
    cat(x[0], x[1], ...)                      ->      flatten(x, 0, 1)

A list over the batch has as many members as there are samples, so static traces of several batch sizes would
not fit together. Where all members only meet again in a `cat` or `stack`, the list is not needed.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_APART = frozenset({aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default})
_TOGETHER = frozenset({aten.cat.default, aten.stack.default})


def rejoin(gm: fx.GraphModule) -> None:
    """Replace every joining of all parts of a tensor, in order, by an op on the tensor; in place."""
    for node in list(gm.graph.nodes):
        source = _taken_apart(node) if node.target in _TOGETHER else None
        if source is None:
            continue
        with gm.graph.inserting_before(node):
            whole = _joined(gm.graph, source, node)
        if whole is not None:
            whole.meta = dict(node.meta)
            node.replace_all_uses_with(whole)
            gm.graph.erase_node(node)
    for node in reversed(gm.graph.nodes):
        if not node.users and (node.target in _APART or node.target is operator.getitem):
            gm.graph.erase_node(node)
    gm.recompile()


def _taken_apart(join: fx.Node) -> fx.Node | None:
    """The op whose results, all and in order, a `cat` or `stack` joins."""
    parts: Any = join.args[0]
    picked = [part for part in parts if isinstance(part, fx.Node) and part.target is operator.getitem]
    if not picked or len(picked) != len(parts) or {part.args[0] for part in picked} != {picked[0].args[0]}:
        return None
    source = picked[0].args[0]
    assert isinstance(source, fx.Node)
    complete = [part.args[1] for part in picked] == list(range(len(source.meta["val"])))
    return source if source.target in _APART and complete else None


def _joined(graph: fx.Graph, apart: fx.Node, join: fx.Node) -> fx.Node | None:
    """`join(apart(x))` as one op on `x`."""
    x: Any = apart.args[0]
    unbound, stacked = apart.target is aten.unbind.int, join.target is aten.stack.default
    split = _dim(apart, 1 if unbound else 2) % x.meta["val"].dim()
    dim = _dim(join, 1) % (join.meta["val"].dim())
    if split != dim or (stacked and not unbound):
        return None
    if unbound and not stacked:
        return graph.call_function(aten.flatten.using_ints, (x, dim, dim + 1))
    return graph.call_function(aten.clone.default, (x,))


def _dim(node: fx.Node, position: int) -> int:
    value: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    return int(value)
