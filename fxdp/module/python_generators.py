"""Equal random numbers of Python and NumPy on all ranks, for code that draws them beside global tensors.

    if np.random.random() < self.layerdrop:     one device draws once; ranks that draw apart compute apart
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fxdp.ranks.generator_states import numpy_generator, python_generator


@contextlib.contextmanager
def equal_generators(exchange: Callable[[Sequence[int]], list[tuple[int, ...]]]) -> Iterator[None]:
    """Let all ranks draw alike inside the block: by their own states if these are equal, else by one seed.

    `exchange` returns all ranks' integers. Different states are as before after the block.
    """
    rows = exchange((python_generator(), numpy_generator()))
    if len(set(rows)) == 1:
        yield
        return
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(rows[0][0])
    np.random.seed(rows[0][1] % (1 << 32))
    try:
        yield
    finally:
        # the next block has other numbers; the first draw tells the ranks' own states apart, as before
        random.setstate(python)
        np.random.set_state(numpy)
        random.random()
        np.random.random()
