"""A program of few layers that are alike, from which that of more layers is made.

    few     embed  F0 F1 F2 F3 F4 F5              head  head'  G5 G4 G3              G2 G1 G0  embed'
    more    embed  F0 F1 F2 C3 .. Cn F3 F4 F5     head  head'  G5 G4 G3 Dn .. D3     G2 G1 G0  embed'

F and G are what forward and backward of a layer are made of, found as runs of the same ops; their borders
need not be those of the layers that were left out. C and D are copies of F2 and G2, each with the parameters
of its own layer. They are right because F2 reads of F1, of the parameters and of what all share just what F1
reads of F0, and G2 likewise, of the forward as well: what comes next reads the same again.

Where that does not hold, `OtherLayersError` says so, and all layers are gone through one by one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from fxdp.ir.region_windows import Regions, begun_before, find_regions, operands

_SHORTEST = 6
_LEAST = 3
"""Windows: one to copy, one before it, one after it."""
_NONE = -(10**6)
"""A number below those of all layers."""

Member = tuple[int, int]
"""The number of a family, and that of a layer: of a parameter, which the other layers have as well."""


class OtherLayersError(Exception):
    """The layers of a program differ in more than their parameters."""


class RepeatedProgram:
    """The nodes of such a program, and which number of a layer each belongs to.

    Parameters
    ----------
    halves : the calls of the forward in their order, and those of the backward.
    given : the parameters and the like that belong to layers.
    known : what of a node is the same in all layers.
    same : values under another name: what the forward saves is an input of the backward.

    Raises
    ------
    OtherLayersError : there are none to be found.
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
        """Of each node of a window its half, the window's number, and its place in it."""
        self.begun: dict[fx.Node, tuple[int, int, int]] = {}
        """The same of what is there of the window before the first, with nodes of no window in between."""
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
        # a backward may read no parameters, but views of them that the forward made
        for layer in (self._layer_of_given, self.layer):
            highest = {i: _highest(row, layer) for i, row in found.rows.items()}
            for step in (1, -1):  # a backward begins with the last layer
                # what is around the layers may look like a part of one
                likely = Counter(number - step * i for i, number in highest.items() if number >= 0)
                (offset, count), *_ = likely.most_common(1) or [(0, 0)]
                if count >= _LEAST:
                    alike = {i: row for i, row in found.rows.items() if highest[i] == offset + step * i}
                    return Regions(alike).numbered(highest.__getitem__)
        raise OtherLayersError("parameters are not read layer by layer")

    def named(self, node: fx.Node) -> fx.Node:
        """The node under the name that it was made by."""
        return self._same.get(node, node)

    def layer(self, node: fx.Node) -> int | None:
        """The number of a node of a window, or of a parameter."""
        node = self.named(node)
        place = self.place(node)
        return self._layer_of_given(node) if place is None else place[1]

    def place(self, node: fx.Node) -> tuple[int, int, int] | None:
        """The half of a node of a window, the window's number, and its place in it."""
        return self.places.get(node) or self.begun.get(node)

    def _layer_of_given(self, node: fx.Node) -> int | None:
        place = self.given.get(self.named(node))
        return None if place is None else place[1]

    def key(self, node: fx.Node) -> tuple[Hashable, int] | None:
        """What a node is in its layer, and the layer's number; None for one of no layer."""
        node = self.named(node)
        if (found := self.place(node)) is not None:
            half, i, k = found
            return (half, k), i
        place = self.given.get(node)
        return None if place is None else (("given", place[0]), place[1])

    def reads(self, node: fx.Node, number: int) -> object:
        """What a node of window `number` reads, in words that are the same for the next window."""
        place = self.key(node)
        return self.named(node) if place is None else (place[0], number - place[1])

    def copied(self, numbers: Iterable[int]) -> int:
        """The first of these windows that reads what the one before it does."""
        for number in numbers:
            if self._parts_what_is_around(number) and all(
                self._like_the_one_before(rows, number) for rows in self.rows
            ):
                return number
        raise OtherLayersError("no layer reads what the one before it does")

    def _parts_what_is_around(self, number: int) -> bool:
        """Whether what comes before the layers reads none after window `number`, and what follows only those.

        A head that reads the window itself would read the first of several that are like it, not the last.
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
    """The last layer of which the nodes read something; none is a number below all others."""
    read = (layer(node) for node in itertools.chain.from_iterable(map(operands, row)))
    return max((number for number in read if number is not None), default=_NONE)


class MoreLayers:
    """Writes the nodes of a program of `more` layers more: all copies of layer `copied`, after it.

    `write(node, args, kwargs, moved, copied)` makes a node like another one, which moves by so many layers,
    and says whether it is of a layer that is made.
    """

    def __init__(
        self, reduced: RepeatedProgram, more: int, numbers: Iterable[int],
        write: Callable[[fx.Node, Any, Any, int, bool], fx.Node],
    ) -> None:  # fmt: skip
        self.reduced = reduced
        self.more = more
        self.copied = reduced.copied(numbers)
        self.plain: dict[fx.Node, fx.Node] = {}
        """Copies of what belongs to no layer."""
        self.made: dict[tuple[Hashable, int], fx.Node] = {}
        """Of what does, by what it is in its layer, and the layer's number among all."""
        self._write = write

    def number(self, number: int) -> int:
        """The number that a window or parameter of the few layers has among all."""
        return number if number <= self.copied else number + self.more

    def numbers(self, number: int) -> range:
        """The numbers of all layers that are like one of the few."""
        first = self.number(number)
        return range(first, first + (self.more if number == self.copied else 0) + 1)

    def template(self, real: int) -> int:
        """Which of the few a layer is like."""
        return min(real, max(self.copied, real - self.more))

    def forget(self) -> None:
        """Go on in another graph, which has inputs of its own."""
        self.plain.clear()
        self.made.clear()

    def add(self, node: fx.Node, real: int | None, made: fx.Node) -> None:
        """Say what stands for a node that is not written here, in layer `real` or in none."""
        place = self.reduced.key(node)
        if place is None or real is None:
            self.plain[self.reduced.named(node)] = made
        else:
            self.made[place[0], real] = made

    def write_half(self, half: int) -> None:
        """Write one half with all layers."""
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
        """Write a node of window `number` for layer `real`; in none, `real` says how far it moves."""
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self.copy_of(n, number, real))
        moved = real if number is None else real - number
        made = self._write(node, args, kwargs, moved, number == self.copied and moved > 0)
        self.add(node, None if number is None else real, made)

    def copy_of(self, node: fx.Node, number: int | None, real: int) -> fx.Node:
        """What stands for a node that one of window `number` reads, for layer `real`."""
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
        """What stands for a result of one of the few layers, for one that is like it."""
        number = self.template(real)
        if self.reduced.layer(node) is None and real != self.number(number):
            raise OtherLayersError(f"%{node.name} of a layer is computed outside of the layers")
        return self.copy_of(node, number, real)

    def templates(self, count: int) -> Iterator[tuple[int, int]]:
        """For each of `count` layers that of the few which it is like."""
        for real in range(count):
            yield real, self.template(real)
