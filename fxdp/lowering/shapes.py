"""Which sizes a program is compiled for, and with which ones it is traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxdp.symbols import LOCAL, OFFSET, B
from fxdp.torch_compat import FakeTensorMode, static_mode, symbolic_sizes

__all__ = ["Shapes", "SizesFixedError"]


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
        """0 and 1 would be taken for constants, and a rank's part lies inside of the batch.

        B 6, b 4, offset 2, b_max 4     ->  B 8, b 4, offset 4, b_max 5
        """
        hints = {name: max(value, 2 + i) for i, (name, value) in enumerate(self.sizes.items())}
        inside = sum(hints.get(size.name, 0) for size in (LOCAL, OFFSET))
        return hints | {B.name: max(hints[B.name], inside)}
