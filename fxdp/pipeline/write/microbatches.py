"""Split one rank's batch into the micro-batches of a step, or into blocks whose borders no mesh moves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxdp.errors import InputError


@dataclass(frozen=True)
class MicrobatchSizes:
    """Size symbols of each micro-batch (the full local batch under None), and start and size of each.

    Attributes
    ----------
    first : the number of the rank's first micro-batch among those of all ranks.
    blocks : the number of blocks of the global batch, if the micro-batches are blocks; else None.
    """

    sizes: Mapping[int | None, Mapping[str, int]]
    bounds: tuple[tuple[int, int], ...]
    first: int = 0
    blocks: int | None = None

    @classmethod
    def of(cls, full: Mapping[str, int], microbatches: int, rank: int = 0) -> MicrobatchSizes:
        """Split the sizes of the rank's full batch (`B`, `b`, `offset`, ...).

        Raises
        ------
        InputError : no samples on any rank.
        """
        if microbatches > 1 and full["B"] == 0:
            raise InputError("microbatches > 1 need at least one sample in the global batch")
        return cls._at(full, _microbatch_bounds(full["b"], microbatches), rank * microbatches)

    @classmethod
    def of_blocks(cls, full: Mapping[str, int], block: int) -> MicrobatchSizes:
        """Split the sizes of the rank's full batch, which `check_blocks` accepts, at the borders of blocks.

        A rank without samples runs one empty block, whose results no sum counts.
        """
        size, offset = full["b"], full["offset"]
        starts = range(0, max(size, 1), block)
        bounds = [(start, min(block, size - start)) for start in starts]
        return cls._at(full, bounds, -(-offset // block), -(-full["B"] // block))

    @classmethod
    def _at(
        cls, full: Mapping[str, int], bounds: Sequence[tuple[int, int]], first: int, blocks: int | None = None
    ) -> MicrobatchSizes:
        found: dict[int | None, Mapping[str, int]] = {None: full}
        for index, (start, size) in enumerate(bounds):
            found[index] = {**full, "b": size, "offset": full["offset"] + start}
        return cls(found, tuple(bounds), first, blocks)

    @property
    def count(self) -> int:
        """The number of micro-batches of the rank."""
        return len(self.bounds)

    @property
    def is_empty(self) -> bool:
        """True if the rank has no samples."""
        return self.sizes[None]["b"] == 0


def _microbatch_bounds(batch: int, count: int) -> list[tuple[int, int]]:
    """Return start and size of each micro-batch: equal sizes, rounded up, so the last ones may be smaller.

    7 in 4: 2, 2, 2, 1; 2 in 4: 1, 1, 0, 0.
    """
    size = -(-batch // count)
    starts = [min(i * size, batch) for i in range(count + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(starts)]
