"""Processes that load samples: the death of one, told by its batch; those that all load the same samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterDataPipe, default_collate, get_worker_info

from fxdp.errors import InputError


def batches_of_workers(batches: Iterable[Any], epoch: int, first: int) -> Iterator[Any]:
    """Yield a DataLoader's batches, of which the first one has the number `first` in the epoch.

    Raises
    ------
    InputError : a worker process has died. An error of the data set's own code is raised as it is.
    """
    iterator, number = iter(batches), first
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except (RuntimeError, ConnectionError, EOFError) as error:
            of_code = str(error).startswith("Caught ")  # so torch begins what a worker's code raises
            if of_code or (isinstance(error, RuntimeError) and "DataLoader worker" not in str(error)):
                raise
            raise InputError(
                f"a loader worker died, and batch {number} of epoch {epoch} did not come "
                f"({type(error).__name__}: {error}); expected workers that live as long as the epoch. One "
                "that is killed is mostly out of memory, its own or /dev/shm. num_workers=0 loads in this "
                "process, and shows what fails; checkpoints are as they were"
            ) from error
        yield batch
        number += 1


def options_of_a_stream(data: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DataLoader's options with which workers that do not share out an iterable are refused.

    Torch gives each worker a copy of the iterable, whose `__iter__` asks `get_worker_info()` for its share:
    one that never asks yields every sample once for each worker. One that shares out in another way has a
    `worker_init_fn=`, and is left alone, as is a data pipe, which torch shares out itself.
    """
    if options.get("num_workers", 0) < 2 or options.get("worker_init_fn") or isinstance(data, IterDataPipe):
        return dict(options)
    collate = _SharedCollate(type(data).__name__, options.get("collate_fn") or default_collate)
    return {**options, "worker_init_fn": _watch_questions, "collate_fn": collate}


def _watch_questions(worker: int) -> None:
    """Let a worker's description of itself note that its number, or that of workers, was read."""
    info = get_worker_info()
    kind: Any = type(info)

    class Watched(kind):  # type: ignore[misc]
        __slots__ = ()
        asked = False

        def __getattribute__(self, name: str) -> Any:
            if name in ("id", "num_workers"):
                Watched.asked = True
            return super().__getattribute__(name)

    object.__setattr__(info, "__class__", Watched)  # its own refuses attributes


class _SharedCollate:
    """Collate a worker's samples, if the iterable has asked which share is its own."""

    def __init__(self, name: str, collate: Callable[[Any], Any]) -> None:
        self._name, self._collate = name, collate

    def __call__(self, samples: Any) -> Any:
        """Collate.

        Raises
        ------
        InputError : the samples are those of every other worker, too.
        """
        if not getattr(type(get_worker_info()), "asked", True):
            raise InputError(
                f"{self._name} gives each worker all of its samples, so that each is seen several times: its "
                "__iter__ does not ask for its share; expected num_workers=0 or 1, samples by "
                "torch.utils.data.get_worker_info(), or a worker_init_fn= where it is shared out otherwise"
            )
        return self._collate(samples)
