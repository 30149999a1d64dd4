"""Order and cut a batch by the weights of its samples, so that the parts of the ranks weigh the same.

    weights of a batch      9 1 1 1 4 4 4 8          halves of four samples weigh 12 and 20
    in their new order      9 1 1 1 4 | 8 4 4        samples are chosen for each half, then within these
                            9 | 1 1 1 4 | 8 | 4 4    for each quarter, third, ...: one order for any parts

The order depends on the weights alone: one device and any number of ranks have the same one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

_PARTS = (2, 4, 3, 8, 6, 5, 16, 12, 7, 32, 64)
"""Numbers of parts into which an order cuts evenly; the earlier, the more evenly."""
_EACH, _MOST = 4, 8
"""Numbers up to `_MOST` that divide a batch into parts of `_EACH` samples or more come before all others."""
_SWAPS = 8
"""The most swaps of samples between two halves, after which hardly any helps."""


def evenly_cut_order(weights: Sequence[float]) -> list[int]:
    """Return an order of samples, as their indices, that has even cuts into any number of parts."""
    total = sum(weights)
    heaviest_first = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    ends, runs = [1.0], [heaviest_first]  # the samples up to each end, a fraction of the total
    count = len(weights)
    numbers = sorted(_PARTS, key=lambda n: count % n > 0 or count < _EACH * n or n > _MOST)
    for border in (k / parts for parts in numbers for k in range(1, parts)):
        at = bisect_left(ends, border - 1e-9)
        if abs(ends[at] - border) < 1e-9 or len(runs[at]) < 2:
            continue
        before = sum(weights[i] for run in runs[:at] for i in run)
        runs[at : at + 1] = _split(runs[at], weights, total * border - before)
        ends.insert(at, border)
    return [i for run in runs for i in sorted(run)]


def even_parts(weights: Sequence[float], parts: int, block: int = 1) -> list[int]:
    """Return the samples of each part, cut at the multiples of `block` nearest to even weights.

    Without any weight the parts are even in samples.
    """
    count = len(weights)
    begins = [0.0, *accumulate(weights if any(weights) else [1.0] * count)]
    allowed = [*range(0, count, block), count]
    heights = [begins[i] for i in allowed]
    ends = [allowed[nearest(heights, begins[-1] * k / parts)] for k in range(1, parts)]
    return [after - before for before, after in pairwise([0, *ends, count])]


def nearest(heights: Sequence[float], height: float) -> int:
    """Return the index of the nearest of some numbers, of several the first."""
    return min(range(len(heights)), key=lambda i: abs(heights[i] - height))


def _split(
    heaviest_first: Sequence[int], weights: Sequence[float], target: float
) -> tuple[list[int], list[int]]:
    """Return samples that weigh nearly `target`, and the rest: each goes where more room is left.

    Then the two that come nearest change sides, as long as this helps.
    """
    found: tuple[list[int], list[int]] = [], []
    room = [target, sum(weights[i] for i in heaviest_first) - target]
    for i in heaviest_first:
        side = int(room[1] > room[0])
        found[side].append(i)
        room[side] -= weights[i]
    missing = room[0]
    for _ in range(_SWAPS):
        best = _best_swap(*found, weights, missing)
        if best is None:
            break
        moved = [[i for i in (one,) if i is not None] for one in best]
        missing += sum(weights[i] for i in moved[0]) - sum(weights[i] for i in moved[1])
        changed = [
            (set(side) - set(out)) | set(into)
            for side, out, into in zip(found, moved, moved[::-1], strict=True)
        ]
        found = (
            [i for i in heaviest_first if i in changed[0]],
            [i for i in heaviest_first if i in changed[1]],
        )
    return found


def _best_swap(
    first: Sequence[int], second: Sequence[int], weights: Sequence[float], missing: float
) -> tuple[int | None, int | None] | None:
    """Return a sample of each side whose swap brings the first nearest to its target; None: none helps.

    One of the two may be None. `missing` is what the first side lacks.
    """
    gives = [(0.0, None), *((weights[i], i) for i in first)]
    takes: list[tuple[float, int | None]] = [(0.0, None), *((weights[i], i) for i in reversed(second))]
    heights = [weight for weight, _ in takes]
    best, found = abs(missing) * (1 - 1e-9), None
    for weight, i in gives:
        at = bisect_left(heights, weight + missing)
        for other, j in takes[max(at - 1, 0) : at + 1]:
            if abs(missing + weight - other) < best:
                best, found = abs(missing + weight - other), (i, j)
    return found
