"""Which sizes a program is compiled for, and with which ones it is traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from fxdp.torch_compat import FakeTensorMode, static_mode, symbolic_sizes

_OF_THE_BATCH = ("B", "b", "offset", "b_max")


class SizesFixedError(Exception):
    """Some op made a constant of a size that was to stay open: the program is good for one size only."""


@dataclass(frozen=True)
class Shapes:
    """What a program is compiled for.

    `sizes`: the value of every size symbol (`B`, `b`, `offset`, ...), hints where `generic`.
    `generic`: sizes stay inputs of the compiled code.
    `single`: one rank, so that the local batch is the global one.
    """

    sizes: Mapping[str, int]
    generic: bool
    single: bool

    def trace_sizes(self) -> tuple[FakeTensorMode, dict[str, Any]]:
        """A fake mode, and the size symbols as numbers in it, or as what stands for any number."""
        if self.generic:
            return symbolic_sizes(self._ordinary())
        return static_mode(), dict(self.sizes)

    def _ordinary(self) -> dict[str, int]:
        """Sizes that are no special case: what is equal, or 0 or 1, would be taken to be so always.

        That holds of differences, too: of the padding `b_max - b`, and of what is left of the batch. A rank's
        part lies inside of the batch. All ranks trace with the same sizes, so they get the same program.

            B 6, b_max 4 (b 4 and offset 2, or b 2 and offset 0)    ->  B 10, b 4, offset 2, b_max 6
        """
        hints = {name: max(value, 2 + i) for i, (name, value) in enumerate(self.sizes.items())}
        taken = {hint for name, hint in hints.items() if name not in _OF_THE_BATCH}

        def free(least: int) -> int:
            found = next(n for n in count(least) if n not in taken)
            taken.add(found)
            return found

        full, largest = (self.sizes.get(name, 0) for name in ("B", "b_max"))
        batch = {"b": free(max(largest, 2)), "offset": free(max(full - largest, 2))}
        batch["b_max"] = free(batch["b"] + 2)
        batch["B"] = free(max(full, batch["b_max"] + batch["offset"] + 2))
        return hints | {name: batch[name] for name in hints if name in batch}
