"""A model of ragged batches: its samples, how they are collated, and what each tensor holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxdp import Rows

SAMPLES = 6
"""Of the batch. Those of `BARE` have nothing of an optional axis: no image, edge or box."""
BARE = (3, 5)
SPLITS: dict[int, tuple[int, ...]] = {2: (5, 1), 4: (3, 0, 1, 2)}
"""Samples of each rank. Of two ranks the second has only a bare sample, as the third of four."""

Batch = Any


@dataclass(frozen=True)
class Case:
    """A model whose forward takes the inputs of a batch by keyword and returns the loss."""

    axes: str
    build: Callable[[], nn.Module]
    sample: Callable[[int, torch.Generator], Any]
    collate: Callable[[Sequence[Any]], Batch]
    rows: dict[str, Any]
    """What each input holds, as a compiled module is told."""
    inputs: Callable[[Batch], dict[str, Any]] = dict
    """The inputs of the model in a batch; it is the batch that global tensors take."""
    splits: dict[int, tuple[int, ...]] = field(default_factory=lambda: SPLITS)
    recognised: bool = False
    """Whether global tensors know the batch without `rows`."""

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The batch of these samples."""
        return self.collate([self.sample(i, torch.Generator().manual_seed(i)) for i in numbers])

    def parts(self, world: int) -> list[Batch]:
        """The batch of each rank."""
        found, first = [], 0
        for size in self.splits[world]:
            found.append(self.batch(range(first, first + size)))
            first += size
        return found

    def dims(self) -> Any:
        """As `batch_dims` of a compiled module."""
        return (), self.rows


def joined(
    samples: Sequence[dict[str, Any]], like: dict[str, tuple[int, ...]], rows: dict[str, Any]
) -> Batch:
    """Each tensor of all samples along its rows, empty ones as `like`; values of `into=` count on."""
    found = {}
    for key, shape in like.items():
        row = rows[key]
        dim = row if isinstance(row, int) else row.dim
        into = row.into if isinstance(row, Rows) else None
        values, before = [], 0
        for one in samples:
            values.append(one[key] + before if into else one[key])
            before += _count(one, rows, into) if into else 0
        kind = torch.float64 if key in FLOATS else torch.int64
        found[key] = torch.cat([torch.empty(shape, dtype=kind), *values], dim)
    return found


FLOATS = {"x", "target", "weight", "reward", "pixel_values", "frames", "boxes", "images", "edge_attr"}
"""Inputs whose values are numbers in float64."""


def _count(sample: dict[str, Any], rows: dict[str, Any], axis: str) -> int:
    key, row = next(
        (key, row)
        for key, row in rows.items()
        if isinstance(row, Rows) and row.axis == axis and key in sample
    )
    size: int = sample[key].shape[row.dim or 0]
    return size
