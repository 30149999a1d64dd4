"""The batch axis of global tensors, and the layout of one value along it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxdp.ir.types.placements import Placement, R, Shard
from fxdp.ir.types.sizes import LOCAL, OFFSET, B

if TYPE_CHECKING:
    from fxdp.eager.data_ranks import DataRanks


class BatchAxis:
    """Sizes of the ranks' parts of one batch; `DataRanks.axis` returns equal axes as one object.

    Attributes
    ----------
    ranks : the ranks that hold the parts.
    sizes : the number of samples on each rank, in rank order.
    total, local, offset : the global batch size, this rank's, and the number of samples on earlier ranks.
    largest : the largest part, to which gathered parts are padded; None if all parts are equal.
    values : the values of the symbols `B`, `b` and `offset`.
    line : where a batch of these sizes was first made.
    """

    def __init__(self, ranks: DataRanks, sizes: tuple[int, ...], line: str) -> None:
        self.ranks, self.sizes, self.total, self.line = ranks, sizes, sum(sizes), line
        self.local, self.offset = sizes[ranks.rank], sum(sizes[: ranks.rank])
        self.largest = None if len(set(sizes)) == 1 else max(sizes)
        self.values = {B.name: self.total, LOCAL.name: self.local, OFFSET.name: self.offset}
        self.full = Layout(self, R)
        """The layout of a value that every rank holds in full."""
        self._layouts: dict[Placement, Layout] = {R: self.full}
        self._positions: dict[torch.device, Tensor] = {}

    def layout(self, placement: Placement) -> Layout:
        """Return the layout with this placement, one object for equal placements."""
        found = self._layouts.get(placement)
        if found is None:
            found = self._layouts[placement] = Layout(self, placement)
        return found

    def positions(self, device: torch.device) -> Tensor | None:
        """Return the positions of real samples among gathered, padded parts; None if all parts are equal."""
        if self.largest is None:
            return None
        found = self._positions.get(device)
        if found is None:
            parts = [rank * self.largest + torch.arange(size) for rank, size in enumerate(self.sizes)]
            found = self._positions[device] = torch.cat(parts).to(device)
        return found


class Layout:
    """A placement along a batch axis; compared by identity, because `BatchAxis.layout` interns layouts."""

    __slots__ = ("axis", "placement")

    def __init__(self, axis: BatchAxis, placement: Placement) -> None:
        self.axis, self.placement = axis, placement

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the value."""
        return isinstance(self.placement, Shard)

    @property
    def is_full(self) -> bool:
        """Whether each rank holds the full value."""
        return self.placement == R

    def __str__(self) -> str:
        return f"{self.placement} of {self.axis.sizes}" if self.is_sharded else str(self.placement)
