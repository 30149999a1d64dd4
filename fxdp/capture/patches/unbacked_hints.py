"""Unbacked hints: integers that the user's Python code reads from data but that follow from the batch size.

    graphs = int(graph_of_node.max()) + 1       the number of samples
    height, width = sizes[0].tolist()           images of one size
    kept = patches[~masked].reshape(b, -1, c)   rows: the number of samples times a constant

A trace knows no values. If capture fails without the integers, the model runs eagerly on the caller's own
samples, at each of the batch sizes of the traces, and the traced code gets the integers of these runs. The
program has each integer as a constant, or as a formula in the batch size. Each step verifies the integers.
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
from fxdp.ir.graph.metadata import Location

_Place: TypeAlias = "tuple[str, int]"
"""A file, and a line."""


@dataclass(frozen=True, slots=True)
class HintedNumber:
    """Result of one read of integers: a number, or lists of numbers."""

    place: _Place
    value: Any


def decided_by_size(runs: Mapping[int, Sequence[HintedNumber]]) -> dict[int, tuple[HintedNumber, ...]]:
    """Return the reads in runs with these batch sizes that only depend on the batch size.

    A line that a run passes n times is kept if the n numbers have formulas, or if all are one number at every
    size. A line that reads lists is kept if lengths are equal, or if lists hold one number for each sample at
    every size.
    """
    places = dict.fromkeys(read.place for reads in runs.values() for read in reads)
    kept = {place for place in places if _is_decided(runs, place)}
    if not kept:
        return {}
    return {batch: tuple(read for read in reads if read.place in kept) for batch, reads in runs.items()}


def _is_decided(runs: Mapping[int, Sequence[HintedNumber]], place: _Place) -> bool:
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
    """Hints for the code of one trace: the results of reads in a run, in order for each line."""

    def __init__(self, reads: Sequence[HintedNumber] = ()) -> None:
        self._left: dict[_Place, deque[Any]] = {}
        for read in reads:
            self._left.setdefault(read.place, deque()).append(read.value)
        self._right: dict[Location, list[Tensor]] = {}

    def value(self, tensor: Tensor, location: Location) -> Any:
        """Return the value of a tensor that is read at a line; None if no run has read a value there."""
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
        """Return the positions at which a mask is true, as many as in a run; None without a run's count."""
        if (location.file, location.line) not in self._left:
            return None
        count = self.value((mask != 0).sum(), location)
        return None if count is None else torch.nonzero_static(mask, size=count)

    def checks(self) -> Iterator[tuple[Location, Tensor]]:
        """Yield each line that got hints, with a tensor that is true if all hints are correct."""
        for location, right in self._right.items():
            yield location, right[0] if len(right) == 1 else torch.stack(right).all()
