"""`Regions`: a row of nodes in which the same ops come again and again, with the place of each node.

    row       embed  ln mm add  ln mm add  ln mm add  loss
    windows          (0)        (1)        (2)                 ln of window 1 has the place (1, 0)

A window is a layer, or a layer from somewhere in its midst to the same place in the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxdp.ir.graph_form import NoTextError, exact_text
from fxdp.ir.repetitions import longest_run

Place = tuple[int, int]
"""The number of a window, and the number of a node in it."""


@dataclass(frozen=True)
class Regions:
    """Windows by their numbers, in the order of their nodes; all have the same ops."""

    rows: dict[int, tuple[fx.Node, ...]]

    @cached_property
    def places(self) -> dict[fx.Node, Place]:
        """Where each node of a window is."""
        return {node: (i, k) for i, row in self.rows.items() for k, node in enumerate(row)}

    def numbered(self, number: Callable[[int], int]) -> Regions:
        """The same windows under other numbers."""
        return replace(self, rows={number(i): row for i, row in self.rows.items()})

    def without(self, first: int, last: int) -> Regions:
        """All but so many of the first and the last windows, numbered from 0."""
        rows = list(self.rows.values())
        return Regions(dict(enumerate(rows[first : len(rows) - last])))


def find_regions(
    nodes: Sequence[fx.Node], known: Callable[[fx.Node], Hashable], *, shortest: int, least: int
) -> Regions | None:
    """The windows of a row of nodes, each `shortest` nodes or longer; None for less than `least` windows.

    Nodes are alike that have the same op, the same arguments beside nodes, and of which the same is `known`.
    """
    run = longest_run([_token(node, known) for node in nodes], shortest=shortest, least=least)
    if run is None:
        return None
    starts = range(run.start, run.end, run.period)
    return Regions({i: tuple(nodes[start : start + run.period]) for i, start in enumerate(starts)})


def begun_before(
    nodes: Sequence[fx.Node], region_windows: Regions, known: Callable[[fx.Node], Hashable]
) -> dict[fx.Node, Place]:
    """The places of nodes before the first window, as far as they are like the end of one.

    Sizes that others ask of the first layer are in between, and have no place, nor has what others read, too:

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
    """The nodes among a node's arguments in their order, repeated where they are."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _token(node: fx.Node, known: Callable[[fx.Node], Hashable]) -> Hashable:
    try:
        args: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda _: "%")
        return node.target, exact_text(args), known(node)
    except NoTextError:
        return node  # like no other
