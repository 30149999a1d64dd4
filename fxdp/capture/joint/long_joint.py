"""The joint graph of all layers from that of a few: what the middle ones have is made again for each other.

    short     embed  F0 F1 F2 F3 F4  head  head'  G4 G3 G2 G1 G0  embed'
    long      embed  F0 F1 F2 C3 .. Cn F3 F4  head  head'  G4 G3 Dn .. D3 G2 G1 G0  embed'

F and G are what forward and backward of a layer are made of, found as runs of the same ops; their borders
need not be those of the layers that were left out. C and D are copies of F2 and G2, each with the parameters
of its own layer. They are right because F2 reads of F1, of the parameters and of what all share just what F1
reads of F0, and G2 likewise, of the forward as well: what comes next reads the same again.

Where that does not hold, `OtherLayersError` says so, and all layers are traced.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from fxdp.capture.joint.alike_layers import KEPT, Layers
from fxdp.capture.joint.convert import Slots, identifier, node_name, slot_name
from fxdp.capture.sites import SiteIndex
from fxdp.ir.graph_form import value_text
from fxdp.ir.notes import Note, Site, copy_note, note, sequence_number
from fxdp.ir.slots import Buffer, Gradient, Mutation, Parameter, ResultSlot, Slot
from fxdp.ir.windows import Windows, find_windows, operands
from fxdp.torch_compat import graph_module

_SHORTEST = 6
_LEAST = 3
"""Windows: one to copy, one before it, one after it."""


class OtherLayersError(Exception):
    """The layers of a joint graph differ in more than their parameters."""


def lengthened(short: fx.GraphModule, layers: Layers, slots: Slots) -> fx.GraphModule:
    """The joint graph of all layers.

    Raises
    ------
    OtherLayersError : that cannot be told from the short one.
    """
    return _Lengthened(short, layers, slots).run()


class _Short:
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
        found = [self._windows(nodes) for nodes in (self.forward, self.backward) if nodes]
        self.rows = [windows.rows for windows in found]
        self.places = {
            node: (half, *place)
            for half, windows in enumerate(found)
            for node, place in windows.places.items()
        }

    def _windows(self, nodes: list[fx.Node]) -> Windows:
        found = find_windows(nodes, _known, shortest=_SHORTEST, least=_LEAST)
        if found is None:
            raise OtherLayersError("no run of ops")
        # numbers by the parameters that are read: of the backward's windows the first is the last layer's
        highest = {i: max(self._layers_of(row), default=-KEPT) for i, row in found.rows.items()}
        for step in (1, -1):
            # what is around the layers may look like a part of one
            likely = Counter(number - step * i for i, number in highest.items() if number >= 0)
            (offset, count), *_ = likely.most_common(1) or [(0, 0)]
            if count >= _LEAST:
                alike = {i: row for i, row in found.rows.items() if highest[i] == offset + step * i}
                return Windows(alike).numbered(highest.__getitem__)
        raise OtherLayersError("parameters are not read layer by layer")

    def _layers_of(self, row: tuple[fx.Node, ...]) -> Iterator[int]:
        for node in itertools.chain.from_iterable(map(operands, row)):
            place = self.parameter(node)
            if place is not None:
                yield place[1]

    def parameter(self, node: fx.Node) -> tuple[int, int] | None:
        """The family of a parameter's or buffer's placeholder, and its layer."""
        slot = note(node).slot
        return self.families.get(slot.name) if isinstance(slot, (Parameter, Buffer)) else None

    def layer(self, node: fx.Node) -> int | None:
        """The number of a node of a window, or of a parameter."""
        if node in self.places:
            return self.places[node][1]
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
        for number in (2, 1, 3):
            if all(self._like_the_one_before(rows, number) for rows in self.rows):
                return number
        raise OtherLayersError("no layer reads what the one before it does")

    def _like_the_one_before(self, rows: dict[int, tuple[fx.Node, ...]], number: int) -> bool:
        if not {number - 1, number, number + 1} <= rows.keys():
            return False
        pairs = zip(rows[number], rows[number - 1], strict=True)
        return all(
            self.reads(a, number) == self.reads(b, number - 1)
            for one, other in pairs
            for a, b in zip(operands(one), operands(other), strict=True)
        )


def _known(node: fx.Node) -> object:
    known = note(node)
    return str(known.type), value_text(node.meta.get("val")), node.meta.get("is_gradient_acc"), known.skip


class _Lengthened:
    """Writes the long graph."""

    def __init__(self, gm: fx.GraphModule, layers: Layers, slots: Slots) -> None:
        self.gm = gm
        self.layers = layers
        self.slots = slots
        self.short = _Short(gm, layers)
        self.copied = self.short.copied()
        self.more = layers.count - KEPT
        self.graph = fx.Graph()
        self.plain: dict[fx.Node, fx.Node] = {}
        """Copies of what belongs to no layer."""
        self.made: dict[object, fx.Node] = {}
        """Of what does, by its place in the long graph."""
        self.sites = _Sites(layers)
        self.numbers = _Numbers(self.short, self.copied, self.more)

    def run(self) -> fx.GraphModule:
        self._placeholders()
        for half, nodes in enumerate((self.short.forward, self.short.backward)):
            self._half(half, nodes)
        self._output()
        return graph_module(self.gm, self.graph, "Joint")

    def _real(self, number: int) -> int:
        """The number that a window or parameter of the short graph has in the long one."""
        return number if number <= self.copied else number + self.more

    def _templates(self) -> Iterator[tuple[int, int]]:
        """For each layer of the long graph that of the short one which it is like."""
        for real in range(self.layers.count):
            yield real, min(real, max(self.copied, real - self.more))

    def _placeholders(self) -> None:
        found: list[tuple[Slot, fx.Node, object]] = []
        kept = {self.short.parameter(n): n for n in self.gm.graph.find_nodes(op="placeholder")}
        for node in self.gm.graph.find_nodes(op="placeholder"):
            slot = note(node).slot
            assert slot is not None
            if self.short.parameter(node) is None:
                found.append((slot, node, None))
        for family, names in enumerate(self.layers.families):
            for real, i in self._templates():
                if (node := kept.get((family, i))) is not None:
                    slot = _renamed(note(node).slot, names[real])
                    found.append((slot, node, ("parameter", real, family)))
        for slot, node, place in sorted(found, key=lambda item: self.slots.rank(item[0])):
            made = self.graph.placeholder(identifier(slot_name(slot)))
            made.meta = dict(node.meta)
            copy_note(node, made, slot=slot)
            if place is None:
                self.plain[node] = made
            else:
                self.made[place] = made

    def _half(self, half: int, nodes: list[fx.Node]) -> None:
        if not nodes:
            return
        rows = self.short.rows[half]
        row = rows[self.copied]
        copies = range(self.copied + 1, self.copied + self.more + 1)
        upper = half == 1  # a backward begins with the last layer
        for node in nodes:
            if half == 1 and node is row[0]:
                for real in reversed(copies):
                    self._row(row, real)
            place = self.short.places.get(node)
            if place is not None:
                self._emit(node, place[1], self._real(place[1]))
                upper = half == 0
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
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self._copy_of(n, number, real))
        made = self.graph.create_node(node.op, node.target, args, kwargs, name=node_name(node))
        made.meta = dict(node.meta)
        moved = real if number is None else real - number
        copied = number == self.copied and moved > 0
        copy_note(node, made, site=self.sites.moved(note(node).site, moved, strict=copied))
        if (numbered := sequence_number(node)) is not None:
            made.meta["seq_nr"] = self.numbers.moved(numbered, moved, copied)
        if number is None:
            self.plain[node] = made
        else:
            half, _, k = self.short.places[node]
            self.made[half, real, k] = made

    def _copy_of(self, node: fx.Node, number: int | None, real: int) -> fx.Node:
        """What stands for a node that one of window `number` reads, for layer `real`."""
        layer = self.short.layer(node)
        if layer is None:
            return self.plain[node]
        wanted = self._real(layer) if number is None else real - (number - layer)
        if node in self.short.places:
            half, _, k = self.short.places[node]
            key: object = (half, wanted, k)
        else:
            place = self.short.parameter(node)
            assert place is not None
            key = ("parameter", wanted, place[0])
        if key not in self.made:
            raise OtherLayersError(f"%{node.name} is not there for layer {wanted}")
        return self.made[key]

    def _output(self) -> None:
        output = self.gm.graph.output_node()
        results: list[tuple[ResultSlot, fx.Node]] = []
        families: dict[tuple[int, int], list[tuple[ResultSlot, fx.Node]]] = {}
        for slot, node in zip(note(output).results, output.args[0], strict=True):  # type: ignore[arg-type]
            assert slot is not None
            place = self.short.families.get(_name(slot))
            if place is None:
                results.append((slot, self._copy_of(node, None, 0)))
            else:
                families.setdefault(place, []).append((slot, node))
        for family, names in enumerate(self.layers.families):
            for real, i in self._templates():
                for slot, node in families.get((family, i), ()):
                    results.append((_of(slot, names[real]), self._result(node, i, real)))
        results.sort(key=lambda item: self.slots.result_rank(item[0]))
        made = self.graph.output(tuple(node for _, node in results))
        made.meta["fxdp"] = Note(results=tuple(slot for slot, _ in results))

    def _result(self, node: fx.Node, number: int, real: int) -> fx.Node:
        if self.short.layer(node) is None and real != self._real(number):
            raise OtherLayersError(f"the gradient %{node.name} of a layer is computed outside of the layers")
        return self._copy_of(node, number, real)


def _renamed(slot: Slot | None, name: str) -> Parameter | Buffer:
    assert isinstance(slot, (Parameter, Buffer))
    return replace(slot, name=name)


def _name(slot: ResultSlot) -> str:
    """The parameter or buffer that a result is of."""
    of = slot.of if isinstance(slot, (Gradient, Mutation)) else None
    return of.name if isinstance(of, (Parameter, Buffer)) else ""


def _of(slot: ResultSlot, name: str) -> ResultSlot:
    """The same result of another parameter or buffer."""
    assert isinstance(slot, (Gradient, Mutation))
    renamed = _renamed(slot.of, name)
    if isinstance(slot, Mutation):
        assert isinstance(renamed, Buffer)
        return Mutation(renamed)
    assert isinstance(renamed, Parameter)
    return Gradient(renamed)


class _Numbers:
    """The numbers by which torch tells forward ops apart: those of the layers that are made are new."""

    def __init__(self, short: _Short, copied: int, more: int) -> None:
        self._copied, self._more = copied, more
        self._rows = {i: [sequence_number(n) for n in row] for i, row in short.rows[0].items()}
        self._first: dict[int | None, tuple[int, int]] = {}
        for i, row in self._rows.items():
            for k, number in enumerate(row):
                self._first.setdefault(number, (i, k))
        self._elsewhere = {sequence_number(n) for n in short.forward if n not in short.places}
        used = (sequence_number(n) for n in (*short.forward, *short.backward))
        self._fresh = itertools.count(1 + max((number for number in used if number is not None), default=0))
        self._made: dict[tuple[int, int, bool], int] = {}

    def moved(self, number: int, by: int, copied: bool) -> int:
        """The number of the same op `by` layers later; of what is in no layer its own."""
        if number in self._first:
            i, k = self._first[number]
            layer = i + by
            if self._copied < layer <= self._copied + self._more:
                return self._new(layer, k, True)
            row = self._rows.get(layer if layer <= self._copied else layer - self._more)
            found = None if row is None else row[k]
            return number if found is None else found
        # an op that only the backward still knows
        return self._new(by, number, False) if copied and number not in self._elsewhere else number

    def _new(self, layer: int, k: int, found: bool) -> int:
        if (layer, k, found) not in self._made:
            self._made[layer, k, found] = next(self._fresh)
        return self._made[layer, k, found]


class _Sites:
    """Where nodes of one layer come from, for nodes of another."""

    def __init__(self, layers: Layers) -> None:
        index = SiteIndex(())
        self._rows = [[index.site(n) for n in row] for row in layers.windows.rows.values()]
        self._kept = layers.kept
        self._moved: dict[int, dict[Site, Site]] = {}

    def moved(self, site: Site, by: int, *, strict: bool) -> Site:
        """The same place of the source `by` layers later."""
        if not site.file:
            return site
        if by not in self._moved:
            self._moved[by] = self._table(by)
        found = self._moved[by].get(site)
        if found is None and strict:
            raise OtherLayersError(f"{site} is in no layer")
        return found or site

    def _table(self, by: int) -> dict[Site, Site]:
        found: dict[Site, Site] = {}
        for number, real in enumerate(self._kept):
            if 0 <= number + by < len(self._rows):
                for pair in zip(self._rows[real], self._rows[number + by], strict=True):
                    pairs = [pair]
                    if all(site.module for site in pair):  # sums of gradients know their line alone
                        pairs.append((replace(pair[0], module=""), replace(pair[1], module="")))
                    for one, other in pairs:
                        if found.setdefault(one, other) != other:
                            raise OtherLayersError(f"{one} is {found[one]} and {other}")
        return found


