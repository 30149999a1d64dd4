"""Split a global batch over ranks as evenly as possible, at the borders of blocks if there are any."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from fxdp.errors import InputError


def even_batches(total: int, ranks: int, block: int = 1) -> list[int]:
    """Return the samples of each rank: full blocks, of which the first ranks have one more if need be.

    8 over 3: 3, 3, 2; 8 over 3 in blocks of 3: 3, 3, 2; 10 over 2 in blocks of 4: 8, 2.
    """
    blocks = -(-total // block)
    shares = (blocks // ranks + (rank < blocks % ranks) for rank in range(ranks))
    borders = (min(end * block, total) for end in accumulate(shares, initial=0))
    return [after - before for before, after in pairwise(borders)]


def check_borders(batches: Sequence[int], block: int) -> None:
    """Refuse local batches that cut a block of the global batch.

    Raises
    ------
    InputError : names the ranks whose batch ends within a block, and batches that fit.
    """
    total, ends = sum(batches), list(accumulate(batches))
    cut = [rank for rank, end in enumerate(ends) if end % block and end != total]
    if cut:
        fitting = even_batches(total, len(batches), block)
        named = ", ".join(map(str, cut))
        raise InputError(
            f"fxdp.Bitwise(block={block}): the local batches {list(batches)} cut blocks of the global batch, "
            f"at the ends of ranks {named}; expected multiples of {block} on all ranks but the last that has "
            f"samples, as {fitting}"
        )
