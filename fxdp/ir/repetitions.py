"""Where a row of tokens repeats: the layers of a model, seen in the row of its ops.

    tokens    p q  a b c  a b c  a b c  a x y
    run            start 2, period 3, count 3

The period is not told: it is among the distances at which tokens come back, as what a layer does once comes
back one layer later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_TRIED = 24
"""Distances that are tried as a period. In a model of layers the first is it; others belong to its parts."""


@dataclass(frozen=True, slots=True)
class Repetitions:
    """`count` times the same `period` tokens, from `start` on, and `more` tokens of a further time."""

    start: int
    period: int
    count: int
    more: int = 0

    @property
    def end(self) -> int:
        """Where its entire periods end."""
        return self.start + self.period * self.count


def longest_run(tokens: Sequence[Hashable], *, shortest: int, least: int) -> Repetitions | None:
    """The run that covers most tokens, of periods of at least `shortest` tokens, at least `least` times.

    Of those that cover as much it is the one with the shortest period.
    """
    numbers = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    row = [numbers[token] for token in tokens]
    found = [run for period in _periods(row, shortest) if (run := _run(row, period)).count >= least]
    return max(found, key=lambda run: (run.period * run.count, -run.period), default=None)


def _periods(row: Sequence[int], shortest: int) -> list[int]:
    """The distances between a token and the next one like it, as multiples that are not too short."""
    places: dict[int, list[int]] = {}
    for i, token in enumerate(row):
        places.setdefault(token, []).append(i)
    distances = Counter(b - a for own in places.values() for a, b in pairwise(own))
    likely = sorted(distances, key=lambda d: (-distances[d] * d, d))[:_TRIED]
    return sorted({d * -(-shortest // d) for d in likely})


def _run(row: Sequence[int], period: int) -> Repetitions:
    """The longest stretch in which each token is the one a period later."""
    longest, start, length = 0, 0, 0
    for i in range(len(row) - period):
        length = length + 1 if row[i] == row[i + period] else 0
        if length > longest:
            longest, start = length, i - length + 1
    covered = longest + period if longest else 0
    return Repetitions(start, period, covered // period, covered % period)
