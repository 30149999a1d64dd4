"""Integers of the data that the user's Python code reads, and that the size of the batch alone decides.

    graphs = int(graph_of_node.max()) + 1       as many as there are samples
    height, width = sizes[0].tolist()           images that have one size
    kept = patches[~masked].reshape(b, -1, c)   as many rows as samples, times what is kept of each

A trace knows no values. Where a model cannot be captured without them, it is run at each of the batch sizes
at which it is traced, on the caller's own samples, and the code is told what it read there: the program has
the number as a constant, or as a formula in the size of the batch. Each step makes sure that it is right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxdp.capture.joint.fit import fit_int
from fxdp.ir.metadata import Location

Place: TypeAlias = "tuple[str, int]"
"""A file, a line."""


@dataclass(frozen=True, slots=True)
class HintedNumber:
    """What one read of integers gave: a number, or lists of them."""

    place: Place
    value: Any


def decided_by_size(runs: Mapping[int, Sequence[HintedNumber]]) -> dict[int, tuple[HintedNumber, ...]]:
    """What runs of these batch sizes read, where the size alone can have decided it.

    A place that a run passes n times reads n numbers that have formulas, or at every size the same number; or
    lists, of as many numbers, or at every size of the same number for each sample.
    """
    places = dict.fromkeys(read.place for reads in runs.values() for read in reads)
    kept = {place for place in places if _is_decided(runs, place)}
    if not kept:
        return {}
    return {batch: tuple(read for read in reads if read.place in kept) for batch, reads in runs.items()}


def _is_decided(runs: Mapping[int, Sequence[HintedNumber]], place: Place) -> bool:
    rows = [[read.value for read in reads if read.place == place] for reads in runs.values()]
    leaves = [pytree.tree_leaves(row) for row in rows]
    if len({len(integers) for integers in leaves}) > 1:
        values = [value for row in rows for value in row]
        return _are_equal(values) or (
            all(isinstance(value, list) for value in values) and _are_equal(list(chain.from_iterable(values)))
        )
    return all(fit_int(list(runs), column) is not None for column in zip(*leaves, strict=True))


def _are_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


class UnbackedHints:
    """Tells the code of one trace what a run read, in the same order at each place."""

    def __init__(self, reads: Sequence[HintedNumber] = ()) -> None:
        self._left: dict[Place, deque[Any]] = {}
        for read in reads:
            self._left.setdefault(read.place, deque()).append(read.value)
        self._right: dict[Location, list[Tensor]] = {}

    def value(self, tensor: Tensor, location: Location) -> Any:
        """The value of a tensor that is read at a line; None where no run has read one."""
        left = self._left.get((location.file, location.line))
        if not left:
            return None
        value = left.popleft()
        one = isinstance(value, int)
        wanted = value if one else torch.tensor(value, dtype=tensor.dtype, device=tensor.device)
        right = (tensor.reshape(()) if one else tensor).detach() == wanted
        self._right.setdefault(location, []).append(right if one else right.all())
        return value

    def selected(self, mask: Tensor, location: Location) -> Tensor | None:
        """Where a mask is true, so many places as a run has found; None where none has selected by one."""
        if (location.file, location.line) not in self._left:
            return None
        count = self.value((mask != 0).sum(), location)
        return None if count is None else torch.nonzero_static(mask, size=count)

    def checks(self) -> Iterator[tuple[Location, Tensor]]:
        """Of each line that was told something, whether all of that is right."""
        for location, right in self._right.items():
            yield location, right[0] if len(right) == 1 else torch.stack(right).all()
