"""`Session`: what one rank knows while a script runs."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.data_ranks import DataRanks


@dataclass(frozen=True)
class RunOptions:
    """The options of `fxdp run`.

    Attributes
    ----------
    script, arguments : the script's path, or a module's name, and its command line.
    is_module : whether `script` is the name of a module, as with `python -m`.
    logs : the folder for the output of ranks above 0.
    parts : the ranks' shares of each batch, as `(3, 1)`; equal ones if empty.
    compile_from : the number of the first call of each kind that runs compiled; 0: all run op by op.
    compile_after_s : the seconds that calls of a kind take op by op before one is compiled.
    backend : what compiles, as of `fxdp.compile`.
    """

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    logs: Path = Path()
    parts: tuple[int, ...] = ()
    compile_from: int = 0
    compile_after_s: float = 0.0
    backend: str = "inductor"


@dataclass
class Session:
    """One rank of a running script.

    Attributes
    ----------
    ranks : the ranks among which batches are sharded.
    batches : the number of batches that have entered.
    process : the id of the rank's process; children of the script run as on one device.
    apart : numbers for the batches of loaders that other threads advance, by thread and loader.
    seeded : where each kind of generator was seeded last.
    alone : whether this process is a child that iterates over loaders of its own.
    """

    ranks: DataRanks
    options: RunOptions
    batches: int = field(default=0)
    process: int = field(default_factory=os.getpid)
    apart: dict[str, list[int]] = field(default_factory=dict)
    seeded: dict[str, str] = field(default_factory=dict)
    alone: bool = field(default=False)
    _thread: threading.local = field(default_factory=threading.local)

    @property
    def loads(self) -> bool:
        """Whether this thread loads samples, which ranks do in their own order."""
        return getattr(self._thread, "loads", False)

    @loads.setter
    def loads(self, loads: bool) -> None:
        self._thread.loads = loads

    @property
    def is_child(self) -> bool:
        """Whether this is a process that the script, or a loader, has forked."""
        return os.getpid() != self.process

    def axis(self, total: int) -> BatchAxis:
        """Return the batch axis of `total` samples: even, or by the parts that were asked for."""
        parts = self.options.parts
        if not parts:
            return self.ranks.even_axis(total)
        ends = [total * share // sum(parts) for share in accumulate(parts, initial=0)]
        return self.ranks.axis([end - start for start, end in pairwise(ends)])
