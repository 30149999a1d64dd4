"""`SampleOrder`: which samples are in which batch of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch


def seed_of(*numbers: int) -> int:
    """Return a seed below 2**63 for a few numbers of at least 0, mixed by NumPy's `SeedSequence`."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(frozen=True)
class SampleOrder:
    """The batches of a map-style data set in one epoch.

    Attributes
    ----------
    length : the number of samples.
    batch_size : the samples of a batch of all ranks together; the last one has the rest.
    drop_last : whether a shorter last batch is left out.
    """

    length: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int

    @property
    def batches(self) -> int:
        """The number of batches."""
        full, rest = divmod(self.length, self.batch_size)
        return full + bool(rest and not self.drop_last)

    def samples(self, epoch: int) -> list[int]:
        """Return the indices of the samples of an epoch, in order."""
        if not self.shuffle:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
        return torch.randperm(self.length, generator=generator).tolist()

    def from_batch(self, epoch: int, first: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the batches of an epoch from batch `first`, each as pairs of place and index of a sample."""
        samples = self.samples(epoch)
        for batch in range(first, self.batches):
            begin = batch * self.batch_size
            yield list(enumerate(samples[begin : begin + self.batch_size], begin))
