"""How one seed becomes a stream of random numbers for each rank."""

from __future__ import annotations

_GOLDEN_RATIO = 0x9E3779B97F4A7C15  # 2**64 / phi: consecutive ranks land far apart


def rank_seed(seed: int, rank: int) -> int:
    """The seed of a rank's own generator, different on every rank; below 2**63."""
    return (seed + _GOLDEN_RATIO * (rank + 1)) % 2**63
