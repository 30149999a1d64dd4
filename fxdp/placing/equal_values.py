"""Nodes that are equal because they do the same with equal operands: a mask that a model computes twice.

loss = cross_entropy(logits[labels != -100], labels[labels != -100])        one mask, two nodes
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from fxdp.ir.graph.draws import node_draws


def equal_values(first: fx.Node, second: fx.Node) -> bool:
    """Return whether two nodes of a functional graph have equal values, whatever the inputs are."""
    pending, equal = [(first, second)], set[tuple[fx.Node, fx.Node]]()
    while pending:
        pair = pending.pop()
        if pair[0] is pair[1] or pair in equal:
            continue
        if not _do_the_same(*pair):
            return False
        equal.add(pair)
        pending += zip(pair[0].all_input_nodes, pair[1].all_input_nodes, strict=True)
    return True


def _do_the_same(first: fx.Node, second: fx.Node) -> bool:
    """Return whether two nodes are one op with equal arguments, up to operands."""
    if first.op != "call_function" or first.target is not second.target or node_draws(first):
        return False
    # an op of a user's own may have a state
    if getattr(first.target, "namespace", "aten") != "aten":
        return False
    one, other = (_arguments(node) for node in (first, second))
    return one == other


def _arguments(node: fx.Node) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the arguments of a call, with the place among all operands for each node."""
    places = {source: i for i, source in enumerate(node.all_input_nodes)}
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    # a type beside each number: 1 is True and 1.0
    return [
        (type(leaf), places.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf) for leaf in leaves
    ], spec
