"""Cut a chain of operations into stages: even costs first, few crossing bytes second.

    index      0 1 2 3 4 5
    cost       4 1 1 2 2 2
    crossing    9 9 1 9 3         a cut `c` ends a stage before index `c`

    (1, 4)     4|1 1 2|2 2        costs 4, 4, 4    18 bytes: even
    (3, 5)     4 1 1|2 2|2        costs 6, 4, 2     4 bytes: taken only if the tolerance is 0.5 or more

Both steps are exact dynamic programs over the cut points, quadratic in the number of cut points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxdp.errors import StageError

_ROUNDING = 1e-9
"""Relative slack for sums of floats that were added in a different order."""


@dataclass(frozen=True, slots=True)
class _Chain:
    """The possible cut points of a chain: `ends` are their indices, with 0 and n at the two sides.

    `load[i]` is the total cost before cut point i, `bytes[i]` the bytes that cross there (0 at the sides).
    """

    ends: tuple[int, ...]
    load: NDArray[np.float64]
    bytes: NDArray[np.float64]


def balance(
    costs: Sequence[float], crossing: Sequence[float], stages: int, tolerance: float = 0.10
) -> tuple[int, ...]:
    """Return the `stages - 1` cuts, ascending: a stage ends before index `c` for each cut `c`.

    `costs` belong to n consecutive operations, `crossing[i]` are the bytes that cross between `i` and `i +
    1`; infinity forbids a cut there. Cuts are allowed if the slowest stage costs at most `1 + tolerance`
    times the optimum. The result has the fewest crossing bytes in total; among several, the fastest slowest
    stage.

    Raises
    ------
    StageError : more stages than cut points allow.
    """
    chain = _chain(costs, crossing)
    if not 1 <= stages <= len(chain.ends) - 1:
        raise StageError(
            f"{len(costs)} regions with {len(chain.ends) - 2} cut points cannot make {stages} stages: "
            f"expected 1 to {len(chain.ends) - 1} stages; take fewer, or a model with more layers"
        )
    least = _least_load(chain, stages)
    return _fewest_bytes(chain, stages, limit=least * (1 + tolerance) * (1 + _ROUNDING))


def _chain(costs: Sequence[float], crossing: Sequence[float]) -> _Chain:
    inner = [i + 1 for i, size in enumerate(crossing) if size < math.inf]
    ends = [0, *inner, len(costs)] if costs else [0]
    before = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    sizes = [0.0, *(crossing[c - 1] for c in inner), 0.0]
    return _Chain(tuple(ends), before[ends], np.asarray(sizes[: len(ends)], dtype=np.float64))


def _least_load(chain: _Chain, stages: int) -> float:
    """Return the smallest possible cost of the slowest stage.

    `best[j]` is this cost for everything before cut point `j`, with one more stage in each round.
    """
    count = len(chain.ends)
    # nothing precedes cut point 0, and a stage cannot be empty
    best = np.concatenate([[np.inf], chain.load[1:]])
    for _ in range(1, stages):
        after = np.full(count, np.inf)
        for j in range(1, count):
            after[j] = np.maximum(best[:j], chain.load[j] - chain.load[:j]).min()
        best = after
    return float(best[-1])


def _fewest_bytes(chain: _Chain, stages: int, limit: float) -> tuple[int, ...]:
    """Return the cuts with the least (total bytes, slowest stage), compared in this order, within the limit.

    `sent[j]` and `slowest[j]` describe the best cuts before and at cut point `j`; `came[s][j]` is the
    previous cut.
    """
    count = len(chain.ends)
    sent = np.where(chain.load <= limit, chain.bytes, np.inf)
    sent[0] = np.inf
    slowest, came = chain.load, []
    for _ in range(1, stages):
        new_sent, new_slowest, source = np.full(count, np.inf), np.full(count, np.inf), [0] * count
        for j in range(2, count):
            # the first cut from which a stage up to `j` stays within the limit: costs only grow
            first = int(np.searchsorted(chain.load[:j], chain.load[j] - limit))
            if first == j or not np.isfinite(fewest := sent[first:j].min()):
                continue
            branches = first + np.flatnonzero(sent[first:j] == fewest)
            slow = np.maximum(slowest[branches], chain.load[j] - chain.load[branches])
            source[j] = int(branches[slow.argmin()])
            new_sent[j], new_slowest[j] = fewest + chain.bytes[j], slow.min()
        sent, slowest = new_sent, new_slowest
        came.append(source)
    cuts, at = [], count - 1
    for source in reversed(came):
        at = source[at]
        cuts.append(chain.ends[at])
    return tuple(reversed(cuts))
