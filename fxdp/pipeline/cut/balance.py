"""Cut a chain of segments into stages: even loads first, few crossing bytes second.

    segment    0 1 2 3 4 5
    cost       4 1 1 2 2 2
    crossing    9 9 1 9 3         a cut `c` ends a stage before segment `c`

    (1, 4)     4|1 1 2|2 2        loads 4, 4, 4    18 bytes: even
    (3, 5)     4 1 1|2 2|2        loads 6, 4, 2     4 bytes: taken only if the tolerance is 0.5 or more

Both steps are exact dynamic programs over the cut points, quadratic in their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxdp.errors import StageError

_ROUNDING = 1e-9
"""Relative slack for sums of floats that were added in another order."""


@dataclass(frozen=True, slots=True)
class _Chain:
    """The cut points of the segments: `ends[i]` is a cut's segment, with 0 and n at the two sides.

    `load[i]` is the cost of all segments before it, `bytes[i]` what crosses there (0 at the sides).
    """

    ends: tuple[int, ...]
    load: NDArray[np.float64]
    bytes: NDArray[np.float64]


def balance(
    costs: Sequence[float], crossing: Sequence[float], stages: int, tolerance: float = 0.10
) -> tuple[int, ...]:
    """The `stages - 1` cuts, ascending: a stage ends before segment `c` for each cut `c`.

    `costs` are those of the n consecutive segments, `crossing[i]` the bytes that cross between segment `i`
    and `i + 1`; infinity forbids a cut there. Among the cuts whose slowest stage costs at most
    `1 + tolerance` times the least possible, those with the fewest crossing bytes in total are taken; if
    several, those whose slowest stage is the fastest.

    Raises
    ------
    StageError : more stages than cut points allow.
    """
    chain = _chain(costs, crossing)
    if not 1 <= stages <= len(chain.ends) - 1:
        raise StageError(
            f"{len(costs)} segments with {len(chain.ends) - 2} cut points cannot make {stages} stages: "
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
    """The smallest possible cost of the slowest stage.

    `best[j]`: of the segments before cut `j`, in as many stages as rounds have passed.
    """
    count = len(chain.ends)
    # before cut 0 there is nothing, of which no stage can be made
    best = np.concatenate([[np.inf], chain.load[1:]])
    for _ in range(1, stages):
        after = np.full(count, np.inf)
        for j in range(1, count):
            after[j] = np.maximum(best[:j], chain.load[j] - chain.load[:j]).min()
        best = after
    return float(best[-1])


def _fewest_bytes(chain: _Chain, stages: int, limit: float) -> tuple[int, ...]:
    """The cuts of the least (total bytes, slowest stage), in this order, with no stage above the limit.

    `sent[j]`, `slowest[j]`: of the segments before cut `j`, that cut included; `came[s][j]`: the cut before.
    """
    count = len(chain.ends)
    sent = np.where(chain.load <= limit, chain.bytes, np.inf)
    sent[0] = np.inf
    slowest, came = chain.load, []
    for _ in range(1, stages):
        new_sent, new_slowest, source = np.full(count, np.inf), np.full(count, np.inf), [0] * count
        for j in range(2, count):
            # the first cut from which a stage up to `j` stays within the limit: loads only grow
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
