"""Random bytes of the system, which differ between processes: a script gets rank 0's on all ranks.

    np.random.default_rng()     os.urandom, by way of `secrets`
    uuid.uuid4()                os.urandom
    random.seed()               C code of its own: seeded from here instead

Bytes are a function of rank 0's key, of the script's line that asks, and of how many times it asked: what
rank 0 alone draws elsewhere shifts nothing. Threads and children have the system's own bytes.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fxdp.eager.data_ranks import DataRanks
from fxdp.ranks.agreement import gather_objects
from fxdp.run.script_lines import is_asked_by_script, script_line
from fxdp.torch_compat import Patch, around

_KEY, _SEED = 32, 32
"""Bytes of the key, and of a seed."""


class Entropy:
    """The system's random bytes, of one value on all ranks; making it is a collective call."""

    def __init__(self, ranks: DataRanks) -> None:
        own = os.urandom(_KEY).hex() if ranks.rank == 0 else ""
        self._key = gather_objects(ranks.process_mesh, own)[0]
        self._process = os.getpid()
        self._drawn = Counter[str]()

    def patches(self) -> Iterator[Patch]:
        """Yield the replacements of what asks the system for random bytes."""
        yield Patch(os, "urandom", around(self._bytes))
        yield Patch(random, "_urandom", around(self._bytes))  # of `secrets`, by which NumPy asks
        yield Patch(random.Random, "seed", around(self._seeded))
        yield Patch(random, "seed", lambda plain: plain.__self__.seed)

    def _bytes(self, plain: Callable[[int], bytes], count: int) -> bytes:
        if os.getpid() != self._process or threading.current_thread() is not threading.main_thread():
            return plain(count)
        line = script_line()
        self._drawn[line] += 1
        return hashlib.shake_256(f"{self._key} {line} {self._drawn[line]}".encode()).digest(count)

    def _seeded(self, plain: Callable[..., None], generator: Any, seed: Any = None, version: int = 2) -> None:
        if seed is None and is_asked_by_script(("random",)):  # `tempfile` has names of each rank's own
            seed = os.urandom(_SEED)
        plain(generator, seed, version)
