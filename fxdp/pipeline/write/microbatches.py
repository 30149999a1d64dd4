"""Split one rank's batch into the micro-batches of a step, or into blocks whose borders no mesh moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxdp.errors import InputError
from fxdp.ir.types.sizes import Cuts, axes_of, axis
from fxdp.runtime import p2p


@dataclass(frozen=True)
class MicrobatchSizes:
    """Size symbols of each micro-batch (the full local batch under None), and start and size of each.

    Attributes
    ----------
    first : the number of the rank's first micro-batch among those of all ranks.
    blocks : the number of blocks of the global batch, if the micro-batches are blocks; else None.
    further : start and size of each micro-batch along the further axes of a ragged batch, by name.
    is_empty : True if the rank has no samples.
    """

    sizes: Mapping[int | None, Mapping[str, int]]
    bounds: tuple[tuple[int, int], ...]
    first: int = 0
    blocks: int | None = None
    further: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    is_empty: bool = False

    @classmethod
    def of(
        cls,
        full: Mapping[str, int],
        microbatches: int,
        rank: int = 0,
        cuts: Mapping[str, Sequence[int]] | None = None,
    ) -> MicrobatchSizes:
        """Split the sizes of the rank's full batch (`B`, `b`, `offset`, ...).

        `cuts` are the ends of all micro-batches but the last along each axis; without them these are even.

        Raises
        ------
        InputError : no samples on any rank.
        """
        if microbatches > 1 and full["B"] == 0:
            raise InputError("microbatches > 1 need at least one sample in the global batch")
        bounds = {}
        for one in axes_of(full):
            size = full[one.local.name]
            bounds[one.name] = _bounds(cuts[one.name], size) if cuts else _even_bounds(size, microbatches)
        return cls._at(full, bounds, rank * microbatches)

    @classmethod
    def of_blocks(cls, full: Mapping[str, int], block: int) -> MicrobatchSizes:
        """Split the sizes of the rank's full batch, which `check_blocks` accepts, at the borders of blocks.

        A rank without samples runs one empty block, whose results no sum counts.
        """
        size, offset = full["b"], full["offset"]
        starts = range(0, max(size, 1), block)
        bounds = [(start, min(block, size - start)) for start in starts]
        return cls._at(full, {"": bounds}, -(-offset // block), -(-full["B"] // block))

    @classmethod
    def of_ragged_blocks(cls, full: Mapping[str, int], block: int, rank: int, cuts: Cuts) -> MicrobatchSizes:
        """Split the sizes of the rank's part of a ragged batch where its blocks end.

        A block may have no rows. A rank without samples runs one empty block, as in `of_blocks`.
        """
        bounds = {one.name: _bounds(cuts.ends[one.name], full[one.local.name]) for one in axes_of(full)}
        first, blocks = (-(-sum(samples) // block) for samples in (cuts.samples[:rank], cuts.samples))
        return cls._at(full, bounds, first, blocks, is_empty=not cuts.samples[rank])

    @classmethod
    def _at(
        cls, full: Mapping[str, int], bounds: Mapping[str, Sequence[tuple[int, int]]], first: int,
        blocks: int | None = None, *, is_empty: bool | None = None,
    ) -> MicrobatchSizes:  # fmt: skip
        found: dict[int | None, Mapping[str, int]] = {None: full}
        for index in range(len(bounds[""])):
            found[index] = own = dict(full)
            for name, of_axis in bounds.items():
                one, (start, size) = axis(name), of_axis[index]
                own |= {one.local.name: size, one.offset.name: full[one.offset.name] + start}
        further = {name: of_axis for name, of_axis in bounds.items() if name}
        empty = full["b"] == 0 if is_empty is None else is_empty
        return cls(found, tuple(bounds[""]), first, blocks, further, empty)

    def along(self, name: str) -> Sequence[tuple[int, int]]:
        """Return start and size of each micro-batch along an axis; the empty name is the batch's own."""
        return self.further[name] if name else self.bounds

    @property
    def count(self) -> int:
        """The number of micro-batches of the rank."""
        return len(self.bounds)


@dataclass(frozen=True)
class Recompute:
    """The micro-batches for which a stage recomputes the forward instead of saving activations."""

    policy: str
    microbatches: int

    def __contains__(self, microbatch: int) -> bool:
        if self.policy == "except_last":
            return microbatch < self.microbatches - 1
        return self.policy == "always"


def microbatch_call(
    layout: MicrobatchSizes, index: int, dims: Sequence[int | None], axes: Sequence[tuple[str, str | None]]
) -> tuple[Callable[..., p2p.Microbatch], tuple[Any, ...]]:
    """Return the function that takes a micro-batch out of the full batch, and the arguments that follow.

    `dims` are the batch dims of the inputs, `axes` those of a ragged batch: of each input's rows, and the
    one into which its values point.
    """
    if not axes:
        function = p2p.microbatch if layout.blocks is None else p2p.block
        return function, (index, *layout.bounds[index], list(dims))
    places: list[tuple[int, int, int, int] | None] = []
    for dim, (rows, target) in zip(dims, axes, strict=True):
        before = 0 if target is None else layout.along(target)[index][0]
        places.append(None if dim is None else (dim, *layout.along(rows)[index], before))
    return p2p.ragged_microbatch if layout.blocks is None else p2p.ragged_block, (index, places)


def _even_bounds(batch: int, count: int) -> list[tuple[int, int]]:
    """Return start and size of each micro-batch: equal sizes, rounded up, so the last ones may be smaller.

    7 in 4: 2, 2, 2, 1; 2 in 4: 1, 1, 0, 0.
    """
    size = -(-batch // count)
    return _bounds([min(i * size, batch) for i in range(1, count)], batch)


def _bounds(ends: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Return start and size of each micro-batch, from the ends of all but the last."""
    return [(start, end - start) for start, end in itertools.pairwise([0, *ends, size])]
