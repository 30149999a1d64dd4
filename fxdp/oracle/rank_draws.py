"""Random numbers of virtual ranks, drawn as the runtime draws them, and a check that ranks differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fxdp.ir import seeds
from fxdp.ir.placements import Placement, Shard

_State: TypeAlias = "tuple[Tensor, Tensor | None]"
_CHANCE = 1e-6
_BLOCK = 16  # torch fills normal numbers in blocks and draws the last, partial one anew


class RankGenerators:
    """One generator per rank, seeded from one draw of the user's (`rng="sharded"`)."""

    def __init__(self, world: int) -> None:
        seed = int(torch.randint(0, 2**62, ()).item())
        before = _state()
        self._states = []
        for rank in range(world):
            torch.manual_seed(seeds.rank_seed(seed, rank))
            self._states.append(_state())
        _restore(before)

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Draw from this rank's generator."""
        before = _state()
        _restore(self._states[rank])
        try:
            yield
        finally:
            self._states[rank] = _state()
            _restore(before)


def draw_alike(world: int, draw: Callable[[int], Any]) -> list[Any]:
    """Every rank draws what one device would (`rng="single-device"`)."""
    before, values = _state(), []
    for rank in range(world):
        _restore(before)
        values.append(draw(rank))
    return values


def repeated_draw(values: Sequence[Any], placement: Any) -> tuple[int, int] | None:
    """Two ranks whose sharded random values are the same and cannot be by chance, or None."""
    if isinstance(placement, tuple):
        found = (repeated_draw([v[i] for v in values], p) for i, p in enumerate(placement))
        return next((pair for pair in found if pair is not None), None)
    return _first_pair(values, placement) if isinstance(placement, Shard) else None


def _first_pair(values: Sequence[Tensor], placement: Placement) -> tuple[int, int] | None:
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


def _state() -> _State:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def _restore(state: _State) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
