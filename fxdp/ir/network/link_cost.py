"""Cost of an all-reduce over a network link, and the bucket sizes that suit the link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LARGEST = 25 * 1024 * 1024
"""Bytes of a bucket if no link requires smaller ones."""
IN_MEMORY = 4 * 1024 * 1024
"""Bytes of a bucket if ranks reduce through shared memory; as large as fits into caches."""
_HALF = 1024 * 1024
_LEAST = 64 * 1024
_LATENCY = 3e-4
"""Seconds of a small all-reduce by gloo between two hosts, if it was not measured."""
_LATENCIES = 8
"""Cost of a bucket, as a multiple of an isolated all-reduce's latency.

During a backward, four threads of each rank have to wake up. Over 1 Gbit/s on two cores, with a latency of
0.25 to 0.4 ms, 2 to 4 MiB are best for 10 MiB computed in 9 ms, and for 20 MiB computed in 116 ms. As many
buckets as the latency alone suggests take 1.2 ms of processor time each.
"""


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Seconds of an all-reduce as `latency + bytes * per_byte`, with equal numbers on all ranks."""

    latency: float
    per_byte: float

    @classmethod
    def of_speed(cls, gbit: float) -> LinkCost:
        """Return the cost for a network of `gbit` Gbit/s.

        Two ranks send each byte away and back; more ranks send almost as much.
        """
        return cls(_LATENCY, 8e-9 / gbit)

    def seconds(self, size: int) -> float:
        """Return the seconds for one all-reduce of `size` bytes."""
        return self.latency + size * self.per_byte

    def bucket(self, total: int) -> int:
        """Return the bytes of a bucket for `total` bytes that are computed and reduced concurrently.

            made     |--1--|--2--|--3--|--4--|
            wire           |--1--|--2--|--3--|--4--|        not overlapped: an n-th part, and n latencies

        `total * per_byte / n + n * each` is least at `n = sqrt(total * per_byte / each)`. The size is rounded
        to a power of two, because measurements differ from start to start, and cached programs should not.
        """
        each = _LATENCIES * max(self.latency, 1e-6)
        buckets = max(1.0, math.sqrt(total * self.per_byte / each))
        size = 1 << max(0, round(math.log2(max(total, 1) / buckets)))
        return min(max(size, _LEAST), LARGEST)


def in_memory(total: int) -> int:
    """Return the bytes of a gradient bucket, of `total` bytes, if ranks reduce through shared memory.

    A compiled backward allocates an entire bucket when the first gradient is ready, when most activations are
    still in memory. So a bucket has at most half of all gradients, if the saving justifies a further
    reduction.
    """
    return min(IN_MEMORY, max(_HALF, -(-total // 2)))


def bucket_of(total: int, given: int | None, link: LinkCost | None, largest: int = LARGEST) -> int:
    """Return the bytes of a bucket: the user's choice, or a size that suits the link between ranks."""
    if given is not None:
        return given
    return largest if link is None else link.bucket(total)


def few_runs(sizes: Sequence[int], bucket: int) -> list[slice]:
    """Cut a sequence of sizes into at most `ceil(sum / bucket)` runs, without splitting an item.

    A run has at most `bucket` bytes, or the smallest larger limit that needs so few runs, below twice as many
    bytes. A larger item has a run of its own.

        sizes  [3, 3, 3, 2], bucket 4     11 bytes: 3 runs
        runs   [3] [3] [3] [2]            of 4 bytes, and of 5 [3] [3] [3 2]
    """
    allowed = -(-sum(sizes) // bucket)
    # a larger limit never needs more runs, so bisection finds the smallest one
    low, high = bucket, 2 * bucket
    while low < high:
        room = (low + high) // 2
        low, high = (low, room) if len(_filled(sizes, room)) <= allowed else (room + 1, high)
    return _filled(sizes, low)


def _filled(sizes: Sequence[int], room: int) -> list[slice]:
    """Return the runs that fill the limit `room` greedily, in order."""
    runs, start, filled = list[slice](), 0, 0
    for i, size in enumerate(sizes):
        if i > start and filled + size > room:
            runs.append(slice(start, i))
            start, filled = i, 0
        filled += size
    return [*runs, slice(start, len(sizes))] if sizes else []
