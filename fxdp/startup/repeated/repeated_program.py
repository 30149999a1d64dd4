"""Expansion of a program with few equal layers to a program with more layers.

    few     embed  F0 F1 F2 F3 F4 F5              head  head'  G5 G4 G3              G2 G1 G0  embed'
    more    embed  F0 F1 F2 C3 .. Cn F3 F4 F5     head  head'  G5 G4 G3 Dn .. D3     G2 G1 G0  embed'

F and G are the forward and backward regions of a layer, found as runs of equal ops; their borders need not be
the borders of the omitted layers. C and D are copies of F2 and G2, each with the parameters of its own layer.
The copies are correct because F2 reads, of F1, of the parameters and of shared values, exactly what F1 reads
of F0, and G2 likewise, including values of the forward: the next layer repeats this pattern.

If this does not hold, `OtherLayersError` is raised, and all layers are processed one by one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from fxdp.startup.repeated.region_windows import Regions, begun_before, find_regions, operands

_SHORTEST = 6
_LEAST = 3
"""The smallest number of regions: one to copy, one before and one after."""
_NONE = -(10**6)
"""A number below the numbers of all layers."""

Member = tuple[int, int]
"""A parameter's (family number, layer number); a family has one parameter in each layer."""


class OtherLayersError(Exception):
    """Error: the layers of a program differ in more than their parameters."""


class RepeatedProgram:
    """Nodes of a program with few repeated layers, and the layer number of each.

    Parameters
    ----------
    pair : the calls of the forward in their order, and the calls of the backward.
    given : the layer parameters and similar inputs, with family and layer number.
    known : returns the facts about a node that are equal in all layers.
    same : values under a second name: values that the forward saves are inputs of the backward.

    Raises
    ------
    OtherLayersError : no repeated layers are found.
    """

    def __init__(
        self, pair: Sequence[Sequence[fx.Node]], given: Mapping[fx.Node, Member],
        known: Callable[[fx.Node], Hashable], same: Mapping[fx.Node, fx.Node] | None = None,
    ) -> None:  # fmt: skip
        self.pair = pair
        self.given = given
        self._known = known
        self._same = same or {}
        self.rows: list[dict[int, tuple[fx.Node, ...]]] = []
        self.places: dict[fx.Node, tuple[int, int, int]] = {}
        """Map each node of a region to (0 forward or 1 backward, region number, position)."""
        self.begun: dict[fx.Node, tuple[int, int, int]] = {}
        """Map each node of the incomplete region before the first, like `places`.

        Nodes of no region may be in between.
        """
        for half, nodes in enumerate(pair):
            region_windows = self._windows(nodes)
            self.rows.append(region_windows.rows)
            self.places |= {node: (half, *place) for node, place in region_windows.places.items()}
            if half == 0:
                begun = begun_before(nodes, region_windows, known)
                self.begun |= {node: (half, *place) for node, place in begun.items()}

    def _windows(self, nodes: Sequence[fx.Node]) -> Regions:
        found = find_regions(nodes, self._known, shortest=_SHORTEST, least=_LEAST)
        if found is None:
            raise OtherLayersError("no run of ops")
        # a backward may read no parameters, but views of parameters from the forward
        for layer in (self._layer_of_given, self.layer):
            highest = {i: _highest(row, layer) for i, row in found.rows.items()}
            for step in (1, -1):  # a backward begins with the last layer
                # ops around the layers may look like a part of one
                likely = Counter(number - step * i for i, number in highest.items() if number >= 0)
                (offset, count), *_ = likely.most_common(1) or [(0, 0)]
                if count >= _LEAST:
                    alike = {i: row for i, row in found.rows.items() if highest[i] == offset + step * i}
                    return Regions(alike).numbered(highest.__getitem__)
        raise OtherLayersError("parameters are not read layer by layer")

    def named(self, node: fx.Node) -> fx.Node:
        """Return the node under its first name, as the input or call that computes it."""
        return self._same.get(node, node)

    def layer(self, node: fx.Node) -> int | None:
        """Return the layer number of a node of a region, or of a parameter; None for nodes of no layer."""
        node = self.named(node)
        place = self.place(node)
        return self._layer_of_given(node) if place is None else place[1]

    def place(self, node: fx.Node) -> tuple[int, int, int] | None:
        """Return (forward or backward, region number, position) of a node of a region, or None."""
        return self.places.get(node) or self.begun.get(node)

    def _layer_of_given(self, node: fx.Node) -> int | None:
        place = self.given.get(self.named(node))
        return None if place is None else place[1]

    def key(self, node: fx.Node) -> tuple[Hashable, int] | None:
        """Return the identity of a node within a layer, and the layer's number; None without a layer."""
        node = self.named(node)
        if (found := self.place(node)) is not None:
            half, i, k = found
            return (half, k), i
        place = self.given.get(node)
        return None if place is None else (("given", place[0]), place[1])

    def reads(self, node: fx.Node, number: int) -> object:
        """Describe an operand of region `number` relative to the region: equal for equal layers."""
        place = self.key(node)
        return self.named(node) if place is None else (place[0], number - place[1])

    def copied(self, numbers: Iterable[int]) -> int:
        """Return the first of these regions whose operands correspond to those of the region before."""
        for number in numbers:
            if self._parts_what_is_around(number) and all(
                self._like_the_one_before(rows, number) for rows in self.rows
            ):
                return number
        raise OtherLayersError("no layer reads what the one before it does")

    def _parts_what_is_around(self, number: int) -> bool:
        """Return whether ops before the layers read no region above `number`, and ops after only these.

        A head that reads the region itself would read the first of several copies, not the last.
        """
        for half, nodes in enumerate(self.pair):
            after = half == 1  # a backward begins with what follows the layers
            for node in nodes:
                if node in self.places:
                    after = half == 0
                elif any((n > number) != after for n in map(self.layer, operands(node)) if n is not None):
                    return False
        return True

    def _like_the_one_before(self, rows: dict[int, tuple[fx.Node, ...]], number: int) -> bool:
        if not {number - 1, number, number + 1} <= rows.keys():
            return False
        pairs = zip(rows[number], rows[number - 1], strict=True)
        return all(
            self.reads(a, number) == self.reads(b, number - 1)
            for one, other in pairs
            for a, b in zip(operands(one), operands(other), strict=True)
        )


def _highest(row: tuple[fx.Node, ...], layer: Callable[[fx.Node], int | None]) -> int:
    """Return the highest layer number among the operands of these nodes; `_NONE` if there is none."""
    read = (layer(node) for node in itertools.chain.from_iterable(map(operands, row)))
    return max((number for number in read if number is not None), default=_NONE)


class MoreLayers:
    """Writer of a program with `more` additional layers, all copies of layer `copied`, inserted after it.

    `write(node, args, kwargs, moved, copied)` creates a node like the given one, `moved` layers further, and
    is told by `copied` whether this node belongs to a copied layer.
    """

    def __init__(
        self, reduced: RepeatedProgram, more: int, numbers: Iterable[int],
        write: Callable[[fx.Node, Any, Any, int, bool], fx.Node],
    ) -> None:  # fmt: skip
        self.reduced = reduced
        self.more = more
        self.copied = reduced.copied(numbers)
        self.plain: dict[fx.Node, fx.Node] = {}
        """Copies of nodes that belong to no layer."""
        self.made: dict[tuple[Hashable, int], fx.Node] = {}
        """Copies of nodes of layers, by identity in the layer and number of the expanded layer."""
        self._write = write

    def number(self, number: int) -> int:
        """Return the expanded number of a region or parameter of the reduced program."""
        return number if number <= self.copied else number + self.more

    def numbers(self, number: int) -> range:
        """Return the expanded numbers of all layers that copy a layer of the reduced program."""
        first = self.number(number)
        return range(first, first + (self.more if number == self.copied else 0) + 1)

    def template(self, real: int) -> int:
        """Return the layer of the reduced program that corresponds to an expanded layer."""
        return min(real, max(self.copied, real - self.more))

    def forget(self) -> None:
        """Forget all copies, to go on in a different graph with inputs of its own."""
        self.plain.clear()
        self.made.clear()

    def add(self, node: fx.Node, real: int | None, made: fx.Node) -> None:
        """Register a copy for a node that is not written here, in expanded layer `real` or in none."""
        place = self.reduced.key(node)
        if place is None or real is None:
            self.plain[self.reduced.named(node)] = made
        else:
            self.made[place[0], real] = made

    def write_half(self, half: int) -> None:
        """Write the forward (0) or the backward (1) with all layers."""
        row = self.reduced.rows[half][self.copied]
        copies = range(self.copied + 1, self.copied + self.more + 1)
        upper = half == 1  # a backward begins with the last layer
        for node in self.reduced.pair[half]:
            if half == 1 and node is row[0]:
                for real in reversed(copies):
                    self._row(row, real)
            place = self.reduced.place(node)
            if place is not None:
                self._emit(node, place[1], self.number(place[1]))
                upper = half == 0 and (upper or node in self.reduced.places)
            else:
                self._emit(node, None, self.more if upper else 0)
            if half == 0 and node is row[-1]:
                for real in copies:
                    self._row(row, real)

    def _row(self, row: tuple[fx.Node, ...], real: int) -> None:
        for node in row:
            self._emit(node, self.copied, real)

    def _emit(self, node: fx.Node, number: int | None, real: int) -> None:
        """Write a node of region `number` for expanded layer `real`; without region, move it by `real`."""
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self.copy_of(n, number, real))
        moved = real if number is None else real - number
        made = self._write(node, args, kwargs, moved, number == self.copied and moved > 0)
        self.add(node, None if number is None else real, made)

    def copy_of(self, node: fx.Node, number: int | None, real: int) -> fx.Node:
        """Return the copy of an operand of region `number`, for expanded layer `real`."""
        place = self.reduced.key(node)
        if place is None:
            return self.plain[self.reduced.named(node)]
        what, layer = place
        wanted = self.number(layer) if number is None else real - (number - layer)
        found = self.made.get((what, wanted))
        if found is None:
            raise OtherLayersError(f"%{node.name} is not there for layer {wanted}")
        return found

    def result(self, node: fx.Node, real: int) -> fx.Node:
        """Return the copy of a result of a reduced layer, for the expanded layer `real`."""
        number = self.template(real)
        if self.reduced.layer(node) is None and real != self.number(number):
            raise OtherLayersError(f"%{node.name} of a layer is computed outside of the layers")
        return self.copy_of(node, number, real)

    def templates(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield each of `count` expanded layers with the corresponding layer of the reduced program."""
        for real in range(count):
            yield real, self.template(real)
