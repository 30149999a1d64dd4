"""Nodes that are equal because they do the same with equal operands: a mask that a model computes twice.

loss = cross_entropy(logits[labels != -100], labels[labels != -100])        one mask, two nodes
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxdp.ir.graph.draws import node_draws


class EqualValues:
    """The first of all asked nodes of a functional graph that have equal values, whatever the inputs are."""

    def __init__(self) -> None:
        self._first: dict[fx.Node, fx.Node] = {}
        self._known: dict[Any, fx.Node] = {}

    def first(self, node: fx.Node) -> fx.Node:
        """Return the first node that is equal to this one, which may be the node itself."""
        waiting = [node]
        while waiting:
            one = waiting[-1]
            before = [source for source in one.all_input_nodes if source not in self._first]
            if before and _is_pure(one):
                waiting += before
                continue
            waiting.pop()
            if one not in self._first:
                key = (one.target, self._key(one.args), self._key(one.kwargs)) if _is_pure(one) else one
                self._first[one] = self._known.setdefault(key, one)
        return self._first[node]

    def _key(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._first[value]
        if isinstance(value, dict):
            return tuple((name, self._key(one)) for name, one in value.items())
        if isinstance(value, (list, tuple)):
            return tuple(map(self._key, value))
        return type(value), value  # 1 is True and 1.0


def _is_pure(node: fx.Node) -> bool:
    """Return whether equal operands give equal values; an op of a user's own may have a state."""
    is_torchs = getattr(node.target, "namespace", "aten") == "aten"
    return node.op == "call_function" and is_torchs and not node_draws(node)
