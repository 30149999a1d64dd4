"""The random generators of a script: Python's, NumPy's and torch's have one state on all ranks."""

from __future__ import annotations

from fxdp.eager.data_ranks import DataRanks
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.generator_states import (
    generator_states,
    numpy_generator,
    python_generator,
    set_generator_states,
    torch_generators,
)


def digests() -> tuple[int, ...]:
    """Return a number for the state of each kind of generator: Python's, torch's, NumPy's."""
    return python_generator(), torch_generators("cpu"), numpy_generator()


def share(ranks: DataRanks) -> None:
    """Give all ranks rank 0's states; a collective call."""
    given = gather_objects(ranks.process_mesh, generator_states() if ranks.rank == 0 else [])[0]
    if ranks.rank:
        set_generator_states(given)
