"""Split one device's batches into parts for the ranks, without repeated samples in the last batch.

    one device    [0 1 2 3] [4 5 6 7] [8 9 10]     of a loader with batches of 2 on each of 2 ranks
    rank 0        [0 1]     [4 5]     [8 9]
    rank 1        [2 3]     [6 7]     [10]         a part may be empty: [], from which a batch is made

Frameworks that reduce gradients by themselves fill the last batch with samples of the first batch, so that
every rank has equally many. A compiled module takes uneven and empty parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

import fxdp


class BatchParts(BatchSampler):
    """Batch sampler that yields this rank's part of each batch.

    Parameters
    ----------
    batches : a batch sampler for all ranks, equal on each rank.
    rank, world : this rank and the number of ranks.
    split : True if each given batch is one device's batch; False if `world` consecutive batches are.
    agree : returns the first rank's batches of an epoch on all ranks, for samplers that draw on each rank.
    """

    def __init__(
        self,
        batches: Any,
        rank: int,
        world: int,
        split: bool = False,
        agree: Callable[[list[Any]], list[Any]] | None = None,
    ) -> None:
        self._agree = agree
        self.batch_sampler = batches
        self.process_index, self.num_processes = rank, world
        self.split_batches = split
        self.batch_size = batches.batch_size
        self.drop_last = bool(getattr(batches, "drop_last", False))

    @property
    def sampler(self) -> Any:
        """The sampler that chooses the samples."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    @property
    def _taken(self) -> int:
        """The number of given batches that make up one device's batch."""
        return 1 if self.split_batches else self.num_processes

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self.batch_sampler if self._agree is None else self._agree(list(self.batch_sampler)))
        while taken := list(islice(batches, self._taken)):
            if len(taken) == self._taken or not self.drop_last:
                yield _part([i for batch in taken for i in batch], self.process_index, self.num_processes)

    def __len__(self) -> int:
        count, rest = divmod(len(self.batch_sampler), self._taken)
        return count + (rest > 0 and not self.drop_last)


def _part(samples: Sequence[Any], rank: int, world: int) -> list[Any]:
    """Return a rank's samples, in the order of the batch; the first ranks have one more if needed."""
    least, more = divmod(len(samples), world)
    start = rank * least + min(rank, more)
    return list(samples[start : start + least + (rank < more)])


_MADE_OF = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
"""Constructor arguments of a `DataLoader`, except dataset, batches and collate function."""


def loader_arguments(loader: Any, batches: BatchParts) -> dict[str, Any]:
    """Return the arguments of a loader that is configured like `loader` and yields the ranks' parts."""
    found = {name: getattr(loader, name) for name in _MADE_OF if hasattr(loader, name)}
    return found | {"batch_sampler": batches, "collate_fn": PartCollate(loader.collate_fn, loader.dataset)}


def loader_of_parts(loader: DataLoader[Any], all_samples: bool = False) -> DataLoader[Any]:
    """Return a loader that yields this rank's part of each batch, for your own training loops.

    All ranks of `torch.distributed` use the order of rank 0. A single rank gets the loader itself.

    Parameters
    ----------
    loader : makes the batches of all ranks together, from a dataset with indices.
    all_samples : True if each rank loads all samples of a batch and keeps its own, for a dataset that draws
        random numbers for its samples: ranks that seed alike draw as one device does.

    Raises
    ------
    InputError : the loader reads a stream, so the batches are unknown, or the samples have no indices.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return loader
    check_batches(loader)
    rank, world = dist.get_rank(), dist.get_world_size()
    loaded = (0, 1) if all_samples else (rank, world)
    arguments = loader_arguments(loader, BatchParts(loader.batch_sampler, *loaded, True, _of_first_rank))
    if all_samples:
        arguments["collate_fn"] = OwnPartCollate(loader.collate_fn, rank, world)
    return DataLoader(loader.dataset, **arguments)


def check_batches(loader: DataLoader[Any]) -> None:
    """Raise if the batches of a loader are unknown.

    Raises
    ------
    InputError : the loader reads a stream, or makes no batches.
    """
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise fxdp.InputError(
            "the loader reads an IterableDataset, or makes no batches; expected a dataset with a length and "
            "indices, of which each rank can be given its part of a batch"
        )


def _of_first_rank(batches: list[list[int]]) -> list[list[int]]:
    """Return the batches of rank 0, sent as numbers, so that no data of a rank is unpickled."""
    indices = [index for batch in batches for index in batch]
    if not all(isinstance(index, int) for index in indices):
        raise fxdp.InputError(
            f"the loader's sampler gives values like {indices[0]!r}; expected ints, which ranks exchange"
        )
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    counts = torch.tensor([len(batches), len(indices)], device=device)
    dist.broadcast(counts, 0)
    sizes, flat = (torch.zeros(int(count), dtype=torch.int64, device=device) for count in counts)
    if dist.get_rank() == 0:
        sizes.copy_(torch.tensor([len(batch) for batch in batches]))
        flat.copy_(torch.tensor(indices))
    dist.broadcast(sizes, 0)
    dist.broadcast(flat, 0)
    numbers = iter(flat.tolist())
    return [list(islice(numbers, size)) for size in sizes.tolist()]


class PartCollate:
    """Collate function that also makes an empty batch, from one sample that is cut off."""

    def __init__(self, collate: Callable[[Any], Any], dataset: Any) -> None:
        self.collate = collate
        self._dataset = dataset

    def __call__(self, samples: Any) -> Any:
        """Return the batch of this rank's samples."""
        return self.collate(samples) if len(samples) else emptied(self.collate([self._dataset[0]]))


class OwnPartCollate:
    """Collate function that makes a batch of this rank's part of all samples, also of none."""

    def __init__(self, collate: Callable[[Any], Any], rank: int, world: int) -> None:
        self.collate = collate
        self._rank, self._world = rank, world

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of this rank's samples, given those of all ranks."""
        own = _part(samples, self._rank, self._world)
        return self.collate(own) if own else emptied(self.collate(samples[:1]))


def emptied(batch: Any) -> Any:
    """Return a batch with all samples removed."""
    if isinstance(batch, Tensor):
        return batch[:0] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return _like(batch, {key: emptied(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(emptied, batch))
    if isinstance(batch, (list, tuple)):
        full = all(isinstance(value, (Tensor, Mapping, list, tuple)) for value in batch)
        return _like(batch, map(emptied, batch) if full else ())  # (x, y), or a name for each sample
    return batch


def _like(batch: Any, content: Iterable[Any]) -> Any:
    return type(batch)(content)
