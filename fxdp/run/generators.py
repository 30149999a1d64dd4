"""The random generators of a script: Python's, NumPy's and torch's have one state on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from fxdp.eager.data_ranks import DataRanks
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.generator_states import (
    generator_states,
    numpy_generator,
    python_generator,
    set_generator_states,
    torch_generators,
)
from fxdp.run.script_lines import script_line
from fxdp.torch_compat import Patch, around


def digests() -> tuple[int, ...]:
    """Return a number for the state of each kind of generator: Python's, torch's, NumPy's."""
    return python_generator(), torch_generators("cpu"), numpy_generator()


def share(ranks: DataRanks) -> None:
    """Give all ranks rank 0's states; a collective call."""
    given = gather_objects(ranks.process_mesh, generator_states() if ranks.rank == 0 else [])[0]
    if ranks.rank:
        set_generator_states(given)


def seed_patches(seeded: dict[str, str]) -> Iterator[Patch]:
    """Yield replacements that note in `seeded` where each kind of generator was seeded last."""

    def noting(kind: str) -> Callable[..., Any]:
        def seed(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            seeded[kind] = script_line()
            return plain(*args, **kwargs)

        return around(seed)

    yield Patch((vars(torch), vars(torch.random)), "manual_seed", noting("torch"))
    yield Patch(random, "seed", noting("random"))
    yield Patch(np.random, "seed", noting("numpy.random"))
