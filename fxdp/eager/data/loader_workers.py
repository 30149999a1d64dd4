"""Processes that load samples: the death of one, told by the batch that did not come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

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
