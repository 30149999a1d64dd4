"""A joint graph of few layers, with the number of the layer to which each of its nodes belongs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

from torch import fx

from fxdp.capture.joint.alike_layers import KEPT, Layers
from fxdp.ir.graph_form import value_text
from fxdp.ir.notes import note
from fxdp.ir.slots import Buffer, Parameter
from fxdp.ir.windows import Windows, find_windows, operands

_SHORTEST = 6
_LEAST = 3
"""Windows: one to copy, one before it, one after it."""


class OtherLayersError(Exception):
    """The layers of a joint graph differ in more than their parameters."""


class ShortJoint:
    """The nodes of a short joint graph, and which number of a layer each belongs to."""

    def __init__(self, gm: fx.GraphModule, layers: Layers) -> None:
        calls = [n for n in gm.graph.nodes if n.op == "call_function"]
        self.forward = [n for n in calls if not note(n).backward]
        self.backward = [n for n in calls if note(n).backward]
        self.families = {
            names[real]: (family, i)
            for family, names in enumerate(layers.families)
            for i, real in enumerate(layers.kept)
        }
        self.rows: list[dict[int, tuple[fx.Node, ...]]] = []
        self.places: dict[fx.Node, tuple[int, int, int]] = {}
        for half, nodes in enumerate((self.forward, self.backward)):
            if nodes:
                windows = self._windows(nodes)
                self.rows.append(windows.rows)
                self.places |= {node: (half, *place) for node, place in windows.places.items()}

    def _windows(self, nodes: list[fx.Node]) -> Windows:
        found = find_windows(nodes, _known, shortest=_SHORTEST, least=_LEAST)
        if found is None:
            raise OtherLayersError("no run of ops")
        # a backward may read no parameters, but views of them that the forward made
        for layer in (self._layer_of_parameter, self.layer):
            highest = {i: _highest(row, layer) for i, row in found.rows.items()}
            for step in (1, -1):  # a backward begins with the last layer
                # what is around the layers may look like a part of one
                likely = Counter(number - step * i for i, number in highest.items() if number >= 0)
                (offset, count), *_ = likely.most_common(1) or [(0, 0)]
                if count >= _LEAST:
                    alike = {i: row for i, row in found.rows.items() if highest[i] == offset + step * i}
                    return Windows(alike).numbered(highest.__getitem__)
        raise OtherLayersError("parameters are not read layer by layer")

    def parameter(self, node: fx.Node) -> tuple[int, int] | None:
        """The family of a parameter's or buffer's placeholder, and its layer."""
        slot = note(node).slot
        return self.families.get(slot.name) if isinstance(slot, (Parameter, Buffer)) else None

    def layer(self, node: fx.Node) -> int | None:
        """The number of a node of a window, or of a parameter."""
        return self.places[node][1] if node in self.places else self._layer_of_parameter(node)

    def _layer_of_parameter(self, node: fx.Node) -> int | None:
        place = self.parameter(node)
        return None if place is None else place[1]

    def reads(self, node: fx.Node, number: int) -> object:
        """What a node of window `number` reads, in words that are the same for the next window."""
        if node in self.places:
            half, i, k = self.places[node]
            return half, number - i, k
        place = self.parameter(node)
        return node if place is None else ("parameter", number - place[1], place[0])

    def copied(self) -> int:
        """The window to copy: it reads what the one before it does."""
        for number in (2, 3, 1, 4):
            if self._parts_what_is_around(number) and all(
                self._like_the_one_before(rows, number) for rows in self.rows
            ):
                return number
        raise OtherLayersError("no layer reads what the one before it does")

    def _parts_what_is_around(self, number: int) -> bool:
        """Whether what comes before the layers reads none after window `number`, and what follows only those.

        A head that reads the window itself would read the first of several that are like it, not the last.
        """
        for half, nodes in enumerate((self.forward, self.backward)):
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
    return max((number for number in read if number is not None), default=-KEPT)


def _known(node: fx.Node) -> object:
    known = note(node)
    return str(known.type), value_text(node.meta.get("val")), node.meta.get("is_gradient_acc"), known.skip
