"""`SampleOrder`: which samples are in which batch of an epoch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fxdp.errors import InputError, a_kind
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


def sample_weights(weights: Sequence[float] | Callable[[int], float], count: int) -> Sequence[float]:
    """Return the weight of each of `count` samples, of a sequence or a function of a sample's index.

    Raises
    ------
    InputError : weights that are no numbers of at least 0, or of another number of samples.
    """
    given: Any = list(map(weights, range(count))) if callable(weights) else weights
    try:
        found = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"data_loader: weights is {a_kind(weights)}; expected numbers") from error
    if found.shape != (count,):
        raise InputError(
            f"data_loader: weights of shape {list(found.shape)} for {count} samples; expected [{count}]: a "
            "number for each sample of the data set, or a function of a sample's index"
        )
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if len(wrong):
        raise InputError(
            f"data_loader: the weight of sample {wrong[0]} is {found[wrong[0]]}, as of {len(wrong)} samples; "
            "expected finite numbers of at least 0"
        )
    return found  # type: ignore[return-value]


def digest_of_weights(weights: Sequence[float] | None) -> int | None:
    """Return a number for weights that `sample_weights` returned, by which two runs compare theirs."""
    return None if weights is None else zlib.crc32(np.asarray(weights).tobytes())
