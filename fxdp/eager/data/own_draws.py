"""Random numbers of the data: drawn from states of their own, as if nothing else drew."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from fxdp.eager.data.sample_order import seed_of
from fxdp.ranks.generator_states import generator_states, set_generator_states


class OwnDraws:
    """Generators' states that stand in for the process' own inside of a block, and go on in the next."""

    def __init__(self, *numbers: int) -> None:
        """Begin with states that these numbers seed."""
        self._numbers = numbers
        self._states: list[Any] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Draw from these states inside of the block."""
        before = generator_states()
        if self._states is None:
            seed = seed_of(*self._numbers)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
        else:
            set_generator_states(self._states)
        try:
            yield
        finally:
            self._states = generator_states()
            set_generator_states(before)


class SeededSamples(Dataset[tuple[int, Any]]):
    """A map-style data set whose samples draw random numbers by their place in the run.

    It takes pairs of place and index, as `SampleOrder` gives them.
    """

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self._dataset, self._seed, self._epoch = dataset, seed, epoch

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, Any]:
        place, index = key
        with OwnDraws(self._seed, self._epoch, place)():
            return place, self._dataset[index]


class SeededCollate:
    """A collator of such samples, that draws random numbers by the place of the batch's first sample."""

    def __init__(self, collate: Callable[[Any], Any] | None, seed: int, epoch: int) -> None:
        self._collate, self._seed, self._epoch = collate or default_collate, seed, epoch

    def __call__(self, placed: Sequence[tuple[int, Any]]) -> Any:
        """Return the batch of samples with their places."""
        with OwnDraws(self._seed, self._epoch, placed[0][0], 1)():
            return self._collate([sample for _, sample in placed])
