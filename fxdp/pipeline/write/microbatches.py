"""Split one rank's batch into the micro-batches of a step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from fxdp.errors import InputError


@dataclass(frozen=True)
class MicrobatchSizes:
    """Size symbols of each micro-batch (the full local batch under None), and start and size of each."""

    sizes: Mapping[int | None, Mapping[str, int]]
    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, full: Mapping[str, int], microbatches: int) -> MicrobatchSizes:
        """Split the sizes of the rank's full batch (`B`, `b`, `offset`, ...).

        Raises
        ------
        InputError : no samples on any rank.
        """
        if microbatches > 1 and full["B"] == 0:
            raise InputError("microbatches > 1 need at least one sample in the global batch")
        bounds = _microbatch_bounds(full["b"], microbatches)
        found: dict[int | None, Mapping[str, int]] = {None: full}
        for index, (start, size) in enumerate(bounds):
            found[index] = {**full, "b": size, "offset": full["offset"] + start}
        return cls(found, tuple(bounds))


def _microbatch_bounds(batch: int, count: int) -> list[tuple[int, int]]:
    """Return start and size of each micro-batch: equal sizes, rounded up, so the last ones may be smaller.

    7 in 4: 2, 2, 2, 1; 2 in 4: 1, 1, 0, 0.
    """
    size = -(-batch // count)
    starts = [min(i * size, batch) for i in range(count + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(starts)]
