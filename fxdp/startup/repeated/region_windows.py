"""`Regions`: a sequence of nodes in which equal ops repeat, with the position of each node.

    row       embed  ln mm add  ln mm add  ln mm add  loss
    windows          (0)        (1)        (2)                 ln of window 1 has the place (1, 0)

A window is a layer, or reaches from the middle of one layer to the same position in the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxdp.ir.graph.graph_form import NoTextError, exact_text
from fxdp.startup.repeated.repetitions import longest_run

Place = tuple[int, int]
"""(number of a window, index of a node in this window)."""


@dataclass(frozen=True)
class Regions:
    """Windows by number, in the order of their nodes; all have equal ops."""

    rows: dict[int, tuple[fx.Node, ...]]

    @cached_property
    def places(self) -> dict[fx.Node, Place]:
        """Map each node of a window to (number of the window, index in the window)."""
        return {node: (i, k) for i, row in self.rows.items() for k, node in enumerate(row)}

    def numbered(self, number: Callable[[int], int]) -> Regions:
        """Return these windows with new numbers."""
        return replace(self, rows={number(i): row for i, row in self.rows.items()})

    def without(self, first: int, last: int) -> Regions:
        """Return all windows except the `first` first and the `last` last ones, numbered from 0."""
        rows = list(self.rows.values())
        return Regions(dict(enumerate(rows[first : len(rows) - last])))


def find_regions(
    nodes: Sequence[fx.Node], known: Callable[[fx.Node], Hashable], *, shortest: int, least: int
) -> Regions | None:
    """Return the windows of a sequence of nodes, each at least `shortest` long; None if fewer than `least`.

    Two nodes are equal if op, non-node arguments and the value of `known` are equal.
    """
    run = longest_run([_token(node, known) for node in nodes], shortest=shortest, least=least)
    if run is None:
        return None
    starts = range(run.start, run.end, run.period)
    return Regions({i: tuple(nodes[start : start + run.period]) for i, start in enumerate(starts)})


def begun_before(
    nodes: Sequence[fx.Node], region_windows: Regions, known: Callable[[fx.Node], Hashable]
) -> dict[fx.Node, Place]:
    """Return the places of nodes before the first window, as far as they match the end of a window.

    Nodes in between without a place are sizes that later layers ask of the first layer, and values that later
    windows read as well:

        row        embed  ln size mm add  ln mm add  ln mm add        ln mm add of the first layer: 0
        windows                   (0)        (1)        (2)
    """
    number, row = next(iter(region_windows.rows.items()))
    found: dict[fx.Node, Place] = {}
    k = len(row) - 1
    for node in reversed(nodes[: nodes.index(row[0])]):
        for_all = any(region_windows.places.get(user, (number, 0))[0] != number for user in node.users)
        if k >= 0 and not for_all and _token(node, known) == _token(row[k], known):
            found[node] = number - 1, k
            k -= 1
        elif k < 0 or isinstance(node.meta.get("val"), torch.Tensor):
            break
    return found


def operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among a node's arguments in order, with repetitions."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _token(node: fx.Node, known: Callable[[fx.Node], Hashable]) -> Hashable:
    try:
        args: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda _: "%")
        return node.target, exact_text(args), known(node)
    except NoTextError:
        return node  # equal to no second node
