"""Find the layers of a model among the calls of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from torch import fx

from fxdp.ir.graph.regions import numbers_in, region_of
from fxdp.startup.regions.call_text import token
from fxdp.startup.repeated.alike_layers import layers_of

_SHORTEST = 16
"""The minimal number of nodes of a layer: a call takes some microseconds, too much for a layer of few ops."""
_LEAST_WORK = 8
"""The minimal number of nodes that compute: the saved values of weights are a long run of views."""
_LEAST = 3
"""The minimal number of layers in a run: for two layers, a second compilation costs less than the calls."""

Label: TypeAlias = "tuple[str, int]"
"""A layer: the path of a list of modules, and the number of one."""


def labels(calls: Sequence[fx.Node], order: Sequence[fx.Node]) -> dict[fx.Node, Label]:
    """Return the layer of each call that is in one, of the lists of modules with most equal layers.

    `order` has further calls, which belong to layers but to no region.
    """
    tokens = {n: token(n) for n in calls}
    numbers: dict[str, set[int]] = {}
    for node in calls:
        for container, number in numbers_in(region_of(node)):
            numbers.setdefault(container, set()).add(number)
    found: list[tuple[int, dict[fx.Node, Label]]] = []
    for container in (one for one, own in numbers.items() if len(own) >= _LEAST):
        of = layers_of(order, container)
        rows: dict[int, list[fx.Node]] = {}
        for node in filter(of.__contains__, calls):
            rows.setdefault(of[node], []).append(node)
        kinds = Counter(tuple(map(tokens.__getitem__, row)) for row in rows.values() if _is_large(row))
        if max(kinds.values(), default=0) >= _LEAST:
            saved = sum(len(kind) * (count - 1) for kind, count in kinds.items())
            found.append((saved, {node: (container, number) for node, number in of.items()}))
    found_labels: dict[fx.Node, Label] = {}
    for _, own in sorted(found, key=lambda pair: -pair[0]):
        if found_labels.keys().isdisjoint(own):
            found_labels |= own
    return found_labels


def _is_large(calls: Sequence[fx.Node]) -> bool:
    """Return whether a layer is worth a call."""
    work = sum(not getattr(node.target, "is_view", False) for node in calls)
    return len(calls) >= _SHORTEST and work >= _LEAST_WORK
