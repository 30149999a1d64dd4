"""Search for the repeating run in a sequence of tokens: a model's layers, seen in the sequence of ops.

    tokens    p q  a b c  a b c  a b c  a x y
    run            start 2, period 3, count 3

The period is not given: it is among the distances at which tokens recur, because an op that occurs once per
layer recurs one layer later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_TRIED = 24
"""The number of distances that are tried as a period; for a model of layers, the first is usually right."""


@dataclass(frozen=True, slots=True)
class Repetitions:
    """A run of `count` times `period` tokens from `start`, and `more` tokens of one further repetition."""

    start: int
    period: int
    count: int
    more: int = 0

    @property
    def end(self) -> int:
        """The index after the last complete period."""
        return self.start + self.period * self.count


def longest_run(tokens: Sequence[Hashable], *, shortest: int, least: int) -> Repetitions | None:
    """Return the run that covers most tokens, with a period of at least `shortest`, at least `least` times.

    Among runs that cover equally many tokens, the one with the shortest period wins.
    """
    numbers = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    row = [numbers[token] for token in tokens]
    found = [run for period in _periods(row, shortest) if (run := _run(row, period)).count >= least]
    return max(found, key=lambda run: (run.period * run.count, -run.period), default=None)


def _periods(row: Sequence[int], shortest: int) -> list[int]:
    """Return the likely distances between equal tokens, as multiples of at least `shortest`."""
    places: dict[int, list[int]] = {}
    for i, token in enumerate(row):
        places.setdefault(token, []).append(i)
    distances = Counter(b - a for own in places.values() for a, b in pairwise(own))
    likely = sorted(distances, key=lambda d: (-distances[d] * d, d))[:_TRIED]
    return sorted({d * -(-shortest // d) for d in likely})


def _run(row: Sequence[int], period: int) -> Repetitions:
    """Return the longest run in which each token equals the one a period later."""
    longest, start, length = 0, 0, 0
    for i in range(len(row) - period):
        length = length + 1 if row[i] == row[i + period] else 0
        if length > longest:
            longest, start = length, i - length + 1
    covered = longest + period if longest else 0
    return Repetitions(start, period, covered // period, covered % period)
