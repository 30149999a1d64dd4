"""The random generators of a script: Python's, NumPy's and torch's have one state on all ranks."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from fxdp.eager.data_ranks import DataRanks
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.generator_states import numpy_generator, python_generator, torch_generators


def states() -> list[Any]:
    """Return the states of all global generators, as comparable values."""
    found: list[Any] = [random.getstate(), torch.get_rng_state().numpy().tobytes()]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        name, keys, *rest = numpy_random.get_state()
        found.append((name, keys.tobytes(), *rest))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append(torch.cuda.get_rng_state().numpy().tobytes())
    return found


def restore(found: list[Any]) -> None:
    """Set all generators to states that `states` returned."""
    import numpy

    random.setstate(found[0])
    torch.set_rng_state(torch.frombuffer(bytearray(found[1]), dtype=torch.uint8))
    if len(found) > 2:
        name, keys, *rest = found[2]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
    if len(found) > 3:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(found[3]), dtype=torch.uint8))


def digests() -> tuple[int, ...]:
    """Return a number for the state of each kind of generator: Python's, torch's, NumPy's."""
    return python_generator(), torch_generators("cpu"), numpy_generator()


def share(ranks: DataRanks) -> None:
    """Give all ranks rank 0's states; a collective call."""
    import numpy.random  # noqa: F401  (so that a script's import does not draw a seed of its own)

    given = gather_objects(ranks.process_mesh, states() if ranks.rank == 0 else [])[0]
    if ranks.rank:
        restore(given)
