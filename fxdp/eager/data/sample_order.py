"""`SampleOrder`: which samples are in which batch of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fxdp.ir.types.even_batches import even_batches
from fxdp.ir.types.even_weights import even_parts, evenly_cut_order


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
    weights : what each sample of the data set weighs; None: all the same.
    """

    length: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int
    weights: Sequence[float] | None = None

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
        """Yield the batches of an epoch from batch `first`, each as pairs of place and index of a sample.

        With weights a batch has its samples in an order that has even cuts.
        """
        samples = self.samples(epoch)
        for batch in range(first, self.batches):
            begin = batch * self.batch_size
            found = list(enumerate(samples[begin : begin + self.batch_size], begin))
            if self.weights is not None:
                found = [found[i] for i in evenly_cut_order(self._weights_of(found))]
            yield found

    def parts(self, batch: Sequence[tuple[int, int]], ranks: int, block: int) -> list[int]:
        """Return the samples of each rank, in the order of the batch and in full blocks."""
        if self.weights is None:
            return even_batches(len(batch), ranks, block)
        return even_parts(self._weights_of(batch), ranks, block)

    def _weights_of(self, batch: Sequence[tuple[int, int]]) -> list[float]:
        assert self.weights is not None
        return [float(self.weights[index]) for _, index in batch]
