"""Metadata for nodes of copied layers: the source locations, and sequence numbers of forward ops."""

from __future__ import annotations

import itertools
from dataclasses import replace

from fxdp.capture.locations import LocationIndex
from fxdp.ir.graph.metadata import Location, sequence_number
from fxdp.startup.repeated.repeated_forward import Layers
from fxdp.startup.repeated.repeated_program import OtherLayersError, RepeatedProgram


class Numbers:
    """Sequence numbers, by which torch identifies forward ops; ops of new layers get new numbers."""

    def __init__(self, reduced: RepeatedProgram, copied: int, more: int) -> None:
        self._copied, self._more = copied, more
        self._rows = {i: [sequence_number(n) for n in row] for i, row in reduced.rows[0].items()}
        self._first: dict[int | None, tuple[int, int]] = {}
        for i, row in self._rows.items():
            for k, number in enumerate(row):
                self._first.setdefault(number, (i, k))
        self._elsewhere = {sequence_number(n) for n in reduced.pair[0] if n not in reduced.places}
        used = (sequence_number(n) for n in itertools.chain(*reduced.pair))
        self._fresh = itertools.count(1 + max((number for number in used if number is not None), default=0))
        self._made: dict[tuple[int, int, bool], int] = {}

    def moved(self, number: int, by: int, copied: bool) -> int:
        """Return the number of the same op `by` layers later; ops outside of all layers keep their number."""
        if number in self._first:
            i, k = self._first[number]
            layer = i + by
            if self._copied < layer <= self._copied + self._more:
                return self._new(layer, k, True)
            row = self._rows.get(layer if layer <= self._copied else layer - self._more)
            found = None if row is None else row[k]
            return number if found is None else found
        # an op that only the backward still contains
        return self._new(by, number, False) if copied and number not in self._elsewhere else number

    def _new(self, layer: int, k: int, found: bool) -> int:
        if (layer, k, found) not in self._made:
            self._made[layer, k, found] = next(self._fresh)
        return self._made[layer, k, found]


class Locations:
    """Source locations of nodes in one layer, translated to the same nodes in another layer."""

    def __init__(self, layers: Layers) -> None:
        index = LocationIndex(())
        self._rows = [[index.location(n) for n in row] for row in layers.region_windows.rows.values()]
        self._kept = layers.kept
        self._moved: dict[int, dict[Location, Location]] = {}

    def moved(self, location: Location, by: int, *, strict: bool) -> Location:
        """Return the location of the same op `by` layers later."""
        if not location.file:
            return location
        if by not in self._moved:
            self._moved[by] = self._table(by)
        found = self._moved[by].get(location)
        if found is None and strict:
            raise OtherLayersError(f"{location} is in no layer")
        return found or location

    def _table(self, by: int) -> dict[Location, Location]:
        found: dict[Location, Location] = {}
        for number, real in enumerate(self._kept):
            if 0 <= number + by < len(self._rows):
                for pair in zip(self._rows[real], self._rows[number + by], strict=True):
                    pairs = [pair]
                    if all(location.module for location in pair):  # sums of gradients have no module
                        pairs.append((replace(pair[0], module=""), replace(pair[1], module="")))
                    for one, other in pairs:
                        if found.setdefault(one, other) != other:
                            raise OtherLayersError(f"{one} is {found[one]} and {other}")
        return found
