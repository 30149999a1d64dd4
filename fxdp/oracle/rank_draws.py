"""Draw random numbers for virtual ranks as the runtime does, and check that ranks draw different numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fxdp.ir.graph.draws import (
    drawn_seed,
    kept_random_state,
    own_generator,
    random_state,
    rank_seed,
    set_random_state,
)
from fxdp.ir.types.placements import Shard

_CHANCE = 1e-6
_BLOCK = 16  # torch fills normal numbers in blocks and draws the last, partial block again


class RankGenerators:
    """One generator per rank, seeded from one draw of the user's generator (`rng="sharded"`)."""

    def __init__(self, world: int) -> None:
        seed = drawn_seed()
        self._states = []
        for rank in range(world):
            with own_generator(rank_seed(seed, rank)):
                self._states.append(random_state())

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Draw from this rank's generator inside the block."""
        with kept_random_state():
            set_random_state(self._states[rank])
            try:
                yield
            finally:
                self._states[rank] = random_state()


def draw_alike(world: int, draw: Callable[[int], Any]) -> list[Any]:
    """Draw on every rank the numbers of one device (`rng="single-device"`)."""
    before, values = random_state(), []
    for rank in range(world):
        set_random_state(before)
        values.append(draw(rank))
    return values


def repeated_draw(values: Sequence[Any], placement: Any) -> tuple[int, int] | None:
    """Return two ranks with equal sharded random values that cannot be equal by chance, or None."""
    if isinstance(placement, tuple):
        found = (repeated_draw([v[i] for v in values], p) for i, p in enumerate(placement))
        return next((pair for pair in found if pair is not None), None)
    return _first_pair(values) if isinstance(placement, Shard) else None


def _first_pair(values: Sequence[Tensor]) -> tuple[int, int] | None:
    flat = [value.flatten() for value in values]
    for i, a in enumerate(flat):
        for j, b in enumerate(flat[:i]):
            if _same(a, b):
                return j, i
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    n = min(len(a), len(b))
    if len(a) != len(b) and n > _BLOCK:
        n -= _BLOCK
    if n == 0 or not torch.equal(a[:n], b[:n]):
        return False
    frequencies = torch.unique(a[:n], return_counts=True)[1].double() / n
    return float(frequencies.square().sum()) ** n < _CHANCE
