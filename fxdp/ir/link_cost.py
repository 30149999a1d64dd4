"""What a sum over ranks costs on the wire, and the buckets in which gradients travel best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LARGEST = 25 * 1024 * 1024
"""Bytes of a bucket where no wire asks for smaller ones."""
IN_MEMORY = 4 * 1024 * 1024
"""The same where ranks sum through memory that they share: what caches hold."""
_HALF = 1024 * 1024
_LEAST = 64 * 1024
_LATENCY = 3e-4
"""Seconds of a small sum by gloo between two hosts, where nobody measured them."""
_LATENCIES = 8
"""What a bucket costs, in latencies of a sum alone: four threads of each rank wake up beside the backward.

Over 1 Gbit/s on two cores, with a latency of 0.25 to 0.4 ms: 2 to 4 MiB are best for 10 MiB made in 9 ms, and
for 20 MiB made in 116 ms. As many buckets as the latency alone asks for take 1.2 ms of a processor each.
"""


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The seconds of an all-reduce: `latency + bytes * per_byte`, the same numbers on all ranks."""

    latency: float
    per_byte: float

    @classmethod
    def of_speed(cls, gbit: float) -> LinkCost:
        """Of a network of so many Gbit/s: two ranks send each byte away and back, as do more nearly."""
        return cls(_LATENCY, 8e-9 / gbit)

    def seconds(self, size: int) -> float:
        """Of one sum of so many bytes."""
        return self.latency + size * self.per_byte

    def bucket(self, total: int) -> int:
        """Bytes of a bucket, of `total` that are made one after another and summed meanwhile.

            made     |--1--|--2--|--3--|--4--|
            wire           |--1--|--2--|--3--|--4--|        what is not hidden: an n-th part, and n latencies

        `total * per_byte / n + n * each` is least at `n = sqrt(total * per_byte / each)`. The size is a
        power of two: measurements differ from start to start, and programs that are cached should not.
        """
        each = _LATENCIES * max(self.latency, 1e-6)
        buckets = max(1.0, math.sqrt(total * self.per_byte / each))
        size = 1 << max(0, round(math.log2(max(total, 1) / buckets)))
        return min(max(size, _LEAST), LARGEST)


def in_memory(total: int) -> int:
    """Bytes of a bucket of gradients, of `total`, where ranks sum through memory.

    A compiled backward makes a bucket entire when its first gradient is there: when most activations are,
    too. So it has half of all gradients at most, where that is worth a sum more.
    """
    return min(IN_MEMORY, max(_HALF, -(-total // 2)))


def bucket_of(total: int, given: int | None, link: LinkCost | None, largest: int = LARGEST) -> int:
    """Bytes of a bucket: what the user gave, or what the link between the ranks asks for, if one is known."""
    if given is not None:
        return given
    return largest if link is None else link.bucket(total)


def few_runs(sizes: Sequence[int], bucket: int) -> list[slice]:
    """Cut a row of things into runs for a bucket each, at most `ceil(sum / bucket)`, without splitting one.

    A run has `bucket` bytes at most, or the least more with which there are so few: less than twice as many.
    A larger thing has a run of its own.

        sizes  [3, 3, 3, 2], bucket 4     11 bytes: 3 runs
        runs   [3] [3] [3] [2]            of 4 bytes, and of 5 [3] [3] [3 2]
    """
    allowed = -(-sum(sizes) // bucket)
    # more room never makes more runs, so the least that does is found by halving
    low, high = bucket, 2 * bucket
    while low < high:
        room = (low + high) // 2
        low, high = (low, room) if len(_filled(sizes, room)) <= allowed else (room + 1, high)
    return _filled(sizes, low)


def _filled(sizes: Sequence[int], room: int) -> list[slice]:
    """Runs of what fits into the room, in order."""
    runs, start, filled = list[slice](), 0, 0
    for i, size in enumerate(sizes):
        if i > start and filled + size > room:
            runs.append(slice(start, i))
            start, filled = i, 0
        filled += size
    return [*runs, slice(start, len(sizes))] if sizes else []
