"""The layers of a program: nodes by the module of a list that they come from, as far as these are alike.

    model     h = nn.ModuleList([Block(), ..])       forward h.0 h.1 h.2 ..       backward .. h.2 h.1 h.0

A node knows its module (`Location.module`), and a parameter has the module in its name. Layers are alike if
ops, constants and types of values are equal, and if what they read has the same place seen from each of them:
a value of the layer before, of itself or after, a parameter of its own, or a value outside of all layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, TypeVar

from torch import fx

from fxdp.ir.graph.graph_form import NoTextError, exact_text
from fxdp.ir.graph.regions import number_in, numbers_in, region_of, renumbered
from fxdp.torch_compat import aten

Key = tuple[Hashable, int]
"""The identity of a node within its layer, and the number of the layer."""
_T = TypeVar("_T")


class OtherLayersError(Exception):
    """Error: the layers of a program differ in more than their parameters."""


def operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among a node's arguments in order, with repetitions."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def layers_of(
    nodes: Sequence[fx.Node], container: str, region: Callable[[fx.Node], str] = region_of
) -> dict[fx.Node, int]:
    """Return the layer numbers of the nodes of a forward or backward.

    A node without a module, as a sum of two layers' values or gradients, goes with its last operand, if a
    layer reads the node, or if it is a result before the last layer. The model's head is of no layer.
    """
    found: dict[fx.Node, int] = {}
    place = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        number = number_in(region(node), container)
        if number is None and not region(node):
            last = max((n for n in node.all_input_nodes if n in place), key=place.__getitem__, default=node)
            number = found.get(last)
        if number is not None:
            found[node] = number
    end = max(found.values(), default=0)
    for node in reversed(nodes):
        if node not in found or region(node) or node.meta.get("is_gradient_acc"):
            continue
        result = found[node] != end and any(user.op == "output" for user in node.users)
        if not result and found.keys().isdisjoint(node.users):
            del found[node]
    return found


@dataclass(frozen=True)
class Layers:
    """Rows of nodes with equal ops, in forward and backward, by layer number."""

    container: str
    """The path of the list of modules."""
    rows: Mapping[int, tuple[fx.Node, ...]]
    keys: Mapping[fx.Node, Key]
    """Nodes and parameters of layers."""
    alike: Sequence[int]
    """The numbers of the longest run of layers that read the same."""

    def number(self, node: fx.Node) -> int | None:
        """Return the layer number of a node; None without a layer."""
        key = self.keys.get(node)
        return None if key is None else key[1]

    def distance(self, number: int, other: int) -> int:
        """Return how many layers a layer is after another; some numbers may be absent."""
        return self._order[number] - self._order[other]

    @cached_property
    def _order(self) -> dict[int, int]:
        return {number: i for i, number in enumerate(self.rows)}


class LayeredProgram:
    """The nodes of a program, and what is known of them.

    Parameters
    ----------
    halves : the calls of forward and backward, each in order.
    known : returns the facts about a call, parameter or buffer that are equal in alike layers.
    names : the parameters and buffers, with their names.
    same : values under a second name: what a forward saves is an input of the backward.
    region : returns the region of a call.
    """

    def __init__(
        self, halves: Sequence[Sequence[fx.Node]], known: Callable[[fx.Node], Hashable],
        names: Mapping[fx.Node, str], same: Mapping[fx.Node, fx.Node] | None = None,
        region: Callable[[fx.Node], str] = region_of,
    ) -> None:  # fmt: skip
        self.halves, self._known, self._region = halves, known, region
        self._names, self._same = names, same or {}

    def named(self, node: fx.Node) -> fx.Node:
        """Return the node under its first name, as the input or call that computes it."""
        return self._same.get(node, node)

    def layers(self, least: int) -> Layers:
        """Return the layers of the list with most nodes, of which at least `least` are alike.

        Raises
        ------
        OtherLayersError : there is no such list.
        """
        nodes = Counter[str]()
        numbers: dict[str, set[int]] = {}
        for node in (node for half in self.halves for node in half):
            for container, number in numbers_in(self._region(node)):
                nodes[container] += 1
                numbers.setdefault(container, set()).add(number)
        for container, _ in nodes.most_common():
            if len(numbers[container]) >= least and len((found := self.layers_in(container)).alike) >= least:
                return found
        raise OtherLayersError(f"no {least} layers are alike")

    def layers_in(self, container: str) -> Layers:
        """Return the layers that are the modules of a list."""
        rows: dict[int, list[fx.Node]] = {}
        found: dict[fx.Node, int] = {}
        for half in self.halves:
            found |= layers_of(half, container, self._region)
        for node, number in found.items():
            # later layers ask the first one for a size
            if node.target is not aten.sym_size.int or {found.get(user) for user in node.users} == {number}:
                rows.setdefault(number, []).append(node)
        tokens = {number: tuple(map(self._token, row)) for number, row in sorted(rows.items())}
        equal = {number: tuple(rows[number]) for number in _longest(tokens, tokens.__getitem__)}
        keys: dict[fx.Node, Key] = {}
        for number, row in equal.items():
            keys.update((node, (k, number)) for k, node in enumerate(row))
        for node, name in self._names.items():
            own = number_in(name, container)
            if own is not None and own in equal:
                keys[node] = renumbered(name, container, "*"), own
        keys.update((node, keys[first]) for node, first in self._same.items() if first in keys)
        layers = Layers(container, equal, keys, [])
        return replace(layers, alike=_longest(equal, partial(self._reads, layers)))

    def _token(self, node: fx.Node) -> Hashable:
        try:
            args: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda _: "%")
            return node.target, exact_text(args), self._known(node)
        except NoTextError:
            return node  # equal to no second node

    def _reads(self, layers: Layers, number: int) -> Hashable:
        """Return what a layer reads, seen from the layer."""
        found: list[Hashable] = []
        for source in (n for node in layers.rows[number] for n in operands(node)):
            place = layers.keys.get(source)
            if place is None:
                found.append(self.named(source))
            elif abs(by := layers.distance(number, place[1])) > 1:
                found.append(source)  # of a layer far away: read by no second one in this way
            else:
                found.append((place[0], by, self._known(source) if source in self._names else None))
        return tuple(found)


def _longest(numbers: Iterable[int], of: Callable[[int], _T]) -> list[int]:
    """Return the longest run of these numbers with an equal property."""
    runs = [list(run) for _, run in groupby(numbers, key=of)]
    return max(runs, key=len, default=[])
