"""What a sum over ranks costs on the wire, and the buckets in which gradients travel best."""

from __future__ import annotations

import math
from dataclasses import dataclass

LARGEST = 25 * 1024 * 1024
"""Bytes of a bucket where no wire asks for smaller ones."""
_LEAST = 64 * 1024


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The seconds of an all-reduce: `latency + bytes * per_byte`, the same numbers on all ranks."""

    latency: float
    per_byte: float

    def bucket(self, total: int) -> int:
        """Bytes of a bucket, of `total` that are made one after another and summed meanwhile.

            made     |--1--|--2--|--3--|--4--|
            wire           |--1--|--2--|--3--|--4--|        what is not hidden: an n-th part, and n latencies

        `total * per_byte / n + n * latency` is least at `n = sqrt(total * per_byte / latency)`. The size is a
        power of two: measurements differ from start to start, and programs that are cached should not.
        """
        buckets = max(1.0, math.sqrt(total * self.per_byte / max(self.latency, 1e-6)))
        size = 1 << max(0, round(math.log2(max(total, 1) / buckets)))
        return min(max(size, _LEAST), LARGEST)


def bucket_of(total: int, given: int | None, link: LinkCost | None) -> int:
    """Bytes of a bucket: what the user gave, or what the link between the ranks asks for, if one is known."""
    if given is not None:
        return given
    return LARGEST if link is None else link.bucket(total)
