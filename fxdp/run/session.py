"""`Session`: what one rank knows while a script runs."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    """

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    logs: Path = Path()


@dataclass
class Session:
    """One rank of a running script.

    Attributes
    ----------
    ranks : the ranks among which batches are sharded.
    batches : the number of batches that have entered.
    """

    ranks: DataRanks
    options: RunOptions
    batches: int = field(default=0)

    def axis(self, total: int) -> BatchAxis:
        """Return the batch axis of `total` samples: the first ranks have one more if they do not divide."""
        world = self.ranks.world
        return self.ranks.axis([total // world + (rank < total % world) for rank in range(world)])
