"""The sizes for which a program is compiled, and the sizes with which the program is traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from fxdp.ir.types.sizes import axes_of
from fxdp.torch_compat import FakeTensorMode, static_mode, symbolic_sizes


class SizesFixedError(Exception):
    """Raised if an op specialized a size that should stay symbolic: the program fits one size only."""


@dataclass(frozen=True)
class Shapes:
    """The sizes for which a program is compiled.

    `sizes`: the value of every size symbol (`B`, `b`, `offset`, ...); hints if `generic`.
    `generic`: sizes stay inputs of the compiled code.
    `single`: one rank, so that the local batch equals the global batch.
    `images`: the names of values of other parts that lie channels-last; all others are contiguous.
    """

    sizes: Mapping[str, int]
    generic: bool
    single: bool
    images: frozenset[str] = frozenset()

    def trace_sizes(self) -> tuple[FakeTensorMode, dict[str, Any]]:
        """Return a fake mode, and per size symbol a fixed number or, if `generic`, a symbolic size."""
        if self.generic:
            return symbolic_sizes(self._ordinary())
        return static_mode(), dict(self.sizes)

    def _ordinary(self) -> dict[str, int]:
        """Return hints without special cases: equal sizes, 0 and 1 would be specialized.

        Differences must be ordinary, too: the padding `b_max - b`, and the remainder of the batch. The local
        batch is a proper part of the global batch. All ranks trace with the same hints, so all ranks get the
        same program.

            B 6, b_max 4 (b 4 and offset 2, or b 2 and offset 0)    ->  B 10, b 4, offset 2, b_max 6
        """
        hints = {name: max(value, 2 + i) for i, (name, value) in enumerate(self.sizes.items())}
        axes = axes_of(self.sizes)
        of_axes = {name for one in axes for name in one.inputs}
        taken = {hint for name, hint in hints.items() if name not in of_axes}

        def free(least: int) -> int:
            found = next(n for n in count(least) if n not in taken)
            taken.add(found)
            return found

        batch: dict[str, int] = {}
        for one in axes:
            full, largest = (self.sizes.get(name, 0) for name in (one.total.name, one.largest))
            local, offset = free(max(largest, 2)), free(max(full - largest, 2))
            most = free(local + 2)
            total = free(max(full, most + offset + 2))
            batch |= zip(one.inputs, (total, local, offset, most), strict=True)
        return hints | {name: batch[name] for name in hints if name in batch}
