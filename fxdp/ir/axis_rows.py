"""Rows of each rank along the axes of a batch: how even they are, and how long others wait for the heaviest.

rows of the heaviest rank
  nodes: 2.33 of the mean (7 2 0 3 on the ranks, 64 % of the work)
  edges: 2.29 of the mean (12 0 0 9 on the ranks, 36 % of the work)
by an estimate it has 2.31 of the mean work: the others wait 57 % of a step; ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SHOWN = 8
"""Ranks whose rows are listed; JSON has all."""
_EVEN = 1.005
_REMEDY = "fxdp.data_loader(weights=...) makes even parts"


@dataclass(frozen=True, slots=True)
class AxisRow:
    """The rows of each rank along one axis.

    Attributes
    ----------
    axis : the name of the axis, as in `fxdp.Rows`.
    sizes : the rows of each rank, of the last batch or of the example.
    most : the rows of the heaviest rank of each batch, in all batches.
    mean : the rows of a mean rank, in all batches.
    work : the estimated share of a step's work that is done for rows of this axis; 0 where it is not known.
    batches : the number of batches.
    """

    axis: str
    sizes: tuple[int, ...]
    most: float
    mean: float
    work: float = 0.0
    batches: int = 1

    @classmethod
    def of(cls, axis: str, sizes: Sequence[int], work: float = 0.0) -> AxisRow:
        """Return the row of one batch."""
        return cls(axis, tuple(sizes), max(sizes), sum(sizes) / len(sizes), work)

    def after(self, sizes: Sequence[int]) -> AxisRow:
        """Return the row with one batch more."""
        most, mean = self.most + max(sizes), self.mean + sum(sizes) / len(sizes)
        return AxisRow(self.axis, tuple(sizes), most, mean, self.work, self.batches + 1)

    @property
    def heaviest(self) -> float:
        """The rows of the heaviest rank over those of a mean one; 1 where there are none."""
        return self.most / self.mean if self.mean else 1.0

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many rows, as far as two digits show."""
        return self.heaviest < _EVEN

    def __str__(self) -> str:
        listed = " ".join(map(str, self.sizes[:_SHOWN])) + (" ..." if len(self.sizes) > _SHOWN else "")
        more = f", {100 * self.work:.0f} % of the work" if self.work else ""
        several = f" in {self.batches} batches, at last" if self.batches > 1 else ""
        return f"{self.axis}: {self.heaviest:.2f} of the mean{several} ({listed} on the ranks{more})"


def balance_lines(rows: Sequence[AxisRow]) -> list[str]:
    """Return the rows along each axis, and what the heaviest rank costs; empty for one axis of even parts."""
    uneven = [row for row in rows if not row.is_even]
    if not uneven and len(rows) < 2:
        return []
    lines = ["rows of the heaviest rank", *(f"  {row}" for row in rows)]
    if not uneven:
        return lines
    if sum(row.work for row in rows):
        work = _work_of_ranks(rows)
        most = max(work) * len(work) / sum(work)
        told = f"by an estimate it has {most:.2f} of the mean work: the others wait"
    else:
        most = max(row.heaviest for row in uneven)
        told = "where work goes by the rows of one axis, the others wait up to"
    waits = 100 * (1 - 1 / most)
    return [*lines, f"{told} {waits:.0f} % of a step" + (f"; {_REMEDY}" if waits >= 1 else "")]


def _work_of_ranks(rows: Sequence[AxisRow]) -> list[float]:
    """Return the work of each rank, as shares of all work that is done for rows."""
    work = [0.0] * len(rows[0].sizes)
    for row in rows:
        total = sum(row.sizes)
        for rank, size in enumerate(row.sizes):
            work[rank] += row.work * size / total if total else 0.0
    return work
