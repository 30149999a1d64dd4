"""Equal random numbers of Python and NumPy on all ranks, for code that draws them beside global tensors.

    if np.random.random() < self.layerdrop:     one device draws once; ranks that draw apart compute apart
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

_MASK = (1 << 62) - 1


@contextlib.contextmanager
def equal_generators(exchange: Callable[[Sequence[int]], list[tuple[int, ...]]]) -> Iterator[None]:
    """Let all ranks draw alike inside the block: by their own states if these are equal, else by one seed.

    `exchange` returns all ranks' integers. Different states are as before after the block.
    """
    digests = [row[0] for row in exchange((_digest(),))]
    if len(set(digests)) == 1:
        yield
        return
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(digests[0])
    np.random.seed(digests[0] % (1 << 32))
    try:
        yield
    finally:
        # the next block has other numbers; the first draw tells the ranks' own states apart, as before
        random.setstate(python)
        np.random.set_state(numpy)
        random.random()
        np.random.random()


def _digest() -> int:
    name, keys, *rest = np.random.get_state(legacy=True)
    state = repr((random.getstate(), name, rest)).encode() + np.asarray(keys).tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") & _MASK
