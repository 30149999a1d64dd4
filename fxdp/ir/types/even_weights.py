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


def evenly_cut_order(weights: Sequence[float]) -> list[int]:
    """Return an order of samples, as their indices, that has even cuts into any number of parts."""
    total = sum(weights)
    heaviest_first = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    ends, runs = [1.0], [heaviest_first]  # the samples up to each end, a fraction of the total
    for border in (k / parts for parts in _PARTS for k in range(1, parts)):
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
    """Return samples that weigh nearly `target`, and the rest: each goes where more room is left."""
    found: tuple[list[int], list[int]] = [], []
    room = [target, sum(weights[i] for i in heaviest_first) - target]
    for i in heaviest_first:
        side = int(room[1] > room[0])
        found[side].append(i)
        room[side] -= weights[i]
    return found
