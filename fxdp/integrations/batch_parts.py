"""One device's batches, cut into the ranks' parts; nothing is repeated, whatever the last batch's size.

    one device    [0 1 2 3] [4 5 6 7] [8 9 10]     of a loader with batches of 2 on each of 2 ranks
    rank 0        [0 1]     [4 5]     [8 9]
    rank 1        [2 3]     [6 7]     [10]         a rank may have an empty part: [], of which a batch is made

Frameworks that reduce gradients by themselves fill up the last batch with samples of the first one, so that
every rank has as many. A compiled module takes uneven and empty parts.
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
    """This rank's part of each batch.

    Parameters
    ----------
    batches : the indices of all ranks, the same on each of them.
    rank, world : whose part.
    split : whether one of these batches is one device's; if not, `world` of them in a row are.
    agree : makes all ranks' batches of an epoch those of the first rank, where samplers draw by themselves.
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
        """What chooses the samples."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    @property
    def _taken(self) -> int:
        """How many of the given batches are one of one device."""
        return 1 if self.split_batches else self.num_processes

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self.batch_sampler if self._agree is None else self._agree(list(self.batch_sampler)))
        while taken := list(islice(batches, self._taken)):
            if len(taken) == self._taken or not self.drop_last:
                yield part([i for batch in taken for i in batch], self.process_index, self.num_processes)

    def __len__(self) -> int:
        count, rest = divmod(len(self.batch_sampler), self._taken)
        return count + (rest > 0 and not self.drop_last)


def part(samples: Sequence[Any], rank: int, world: int) -> list[Any]:
    """A rank's samples, in the order of the batch; the first ranks have one more if it does not divide."""
    least, more = divmod(len(samples), world)
    start = rank * least + min(rank, more)
    return list(samples[start : start + least + (rank < more)])


_MADE_OF = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
"""What a `DataLoader` is made of, beside dataset, batches and what makes a batch of samples."""


def loader_arguments(loader: Any, batches: BatchParts) -> dict[str, Any]:
    """The arguments of a loader like this one that gives the ranks' parts."""
    found = {name: getattr(loader, name) for name in _MADE_OF if hasattr(loader, name)}
    return found | {"batch_sampler": batches, "collate_fn": PartCollate(loader.collate_fn, loader.dataset)}


def loader_of_parts(loader: DataLoader[Any]) -> DataLoader[Any]:
    """One device's loader as one that gives this rank its part of each batch, for loops of your own.

    The ranks of `torch.distributed` take the order of rank 0. On one rank it is the loader itself.

    Parameters
    ----------
    loader : makes the batches of all ranks together, of a dataset with indices.

    Raises
    ------
    InputError : the loader reads a stream, of which nobody knows the batches, or its samples have no numbers.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return loader
    check_batches(loader)
    batches = BatchParts(loader.batch_sampler, dist.get_rank(), dist.get_world_size(), True, _of_first_rank)
    return DataLoader(loader.dataset, **loader_arguments(loader, batches))


def check_batches(loader: DataLoader[Any]) -> None:
    """Refuse a loader of which nobody knows the batches.

    Raises
    ------
    InputError : it reads a stream, or makes no batches.
    """
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise fxdp.InputError(
            "the loader reads an IterableDataset, or makes no batches; expected a dataset with a length and "
            "indices, of which each rank can be given its part of a batch"
        )


def _of_first_rank(batches: list[list[int]]) -> list[list[int]]:
    """The batches of rank 0; as numbers, so that nothing of another rank's is unpickled."""
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
    """Makes a batch of samples, also of none: then it is that of one sample, cut off."""

    def __init__(self, collate: Callable[[Any], Any], dataset: Any) -> None:
        self.collate = collate
        self._dataset = dataset

    def __call__(self, samples: Any) -> Any:
        """The batch of this rank's samples."""
        return self.collate(samples) if len(samples) else emptied(self.collate([self._dataset[0]]))


def emptied(batch: Any) -> Any:
    """A batch without its samples."""
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
