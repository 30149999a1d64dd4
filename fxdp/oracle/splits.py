"""Split a global batch over virtual ranks, evenly and in ways that reveal faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from fxdp.errors import InputError
from fxdp.ir.types.even_batches import check_borders, even_batches
from fxdp.ir.types.sizes import Cuts, Split


def default_splits(batch: int, world: int, block: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return three splits: even; uneven with a single-sample and an empty rank; all samples on the last rank.

    (8, 4) -> (2, 2, 2, 2), (5, 2, 0, 1), (0, 0, 0, 8). With two ranks the uneven split has no empty rank.
    With blocks the same, in blocks; the last one may be shorter.
    """
    if world == 1:
        return ((batch,),)
    blocks = -(-batch // block)
    splits = (even_batches(blocks, world), _uneven(blocks, world), (0,) * (world - 1) + (blocks,))
    return tuple(dict.fromkeys(_samples(split, batch, block) for split in splits))


def _samples(blocks: Sequence[int], batch: int, block: int) -> tuple[int, ...]:
    """Return the samples of ranks with so many blocks each."""
    ends = [min(end * block, batch) for end in accumulate(blocks, initial=0)]
    return tuple(after - before for before, after in pairwise(ends))


def check_splits(
    splits: Sequence[Sequence[int]] | Sequence[int] | None, batch: int, world: int, block: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Return the splits to run: the given splits (a single split may stand alone), or the default splits.

    Raises
    ------
    InputError : a split is empty, too large, has negative parts, cuts a block, or is for a different number
        of ranks.
    """
    if splits is None:
        return default_splits(batch, world, block)
    if not _are_numbers(splits):
        raise InputError(
            f"splits={splits!r}; expected one split, a list with the samples of each rank, as [3, 1], or a "
            "list of these"
        )
    given = tuple((one,) if isinstance(one, int) else tuple(one) for one in splits)
    if splits and all(isinstance(one, int) for one in splits):
        given = (tuple(n for one in given for n in one),)
    wrong = [s for s in given if len(s) != world or min(s) < 0 or not 0 < sum(s) <= batch]
    if wrong or not given:
        raise InputError(
            f"splits={list(map(list, given))} do not fit: expected at least one, each of {world} parts (one "
            f"per rank, 0 allowed) with 1 to {batch} samples in all, as many as the given batch has"
        )
    for split in given if block > 1 else ():
        check_borders(split, block)
    return given


def ragged_splits(
    splits: Sequence[Sequence[int]] | Sequence[int] | None,
    ends: Mapping[str, Sequence[int]],
    world: int,
    block: int = 1,
) -> tuple[Split, ...]:
    """Return the splits to run of a ragged batch, with the ranks' rows along each axis.

    Parameters
    ----------
    splits : the samples of each rank, as `check_splits` takes them.
    ends : where samples end along each axis, after a 0; the batch's own axis first.

    Raises
    ------
    InputError : see `check_splits`; splits that leave out samples.
    """
    samples = len(ends[""]) - 1
    every = check_splits(splits, samples, world, block)
    if any(sum(split) != samples for split in every):
        raise InputError(
            f"splits={list(map(list, every))} of a ragged batch; expected all of its {samples} samples"
        )
    found = []
    for split in every:
        cuts = [0, *accumulate(split)]
        rows = {name: [of[b] - of[a] for a, b in pairwise(cuts)] for name, of in ends.items()}
        found.append(Split(rows.pop(""), rows, Cuts(split, (), {})))
    return tuple(found)


def _are_numbers(splits: object) -> bool:
    """Return whether the value is a list of integers, or of lists of integers."""
    if not isinstance(splits, (list, tuple)):
        return False
    parts = [n for one in splits for n in (one if isinstance(one, (list, tuple)) else (one,))]
    return all(isinstance(n, int) and not isinstance(n, bool) for n in parts)


def _uneven(batch: int, world: int) -> tuple[int, ...]:
    if world == 2:
        return (batch - 1, 1)
    rest, heads = batch - 1, world - 2
    parts = [rest // heads] * heads
    parts[0] += rest % heads
    if heads > 1 and parts[-1] > 1:  # (5, 1) reveals more than (3, 3)
        moved = parts[-1] // 2
        parts[0], parts[-1] = parts[0] + moved, parts[-1] - moved
    return (*parts, 0, 1)
