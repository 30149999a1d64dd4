"""Split a global batch over ranks as evenly as possible, at the borders of blocks if there are any."""

from __future__ import annotations

from itertools import accumulate, pairwise


def even_batches(total: int, ranks: int, block: int = 1) -> list[int]:
    """Return the samples of each rank: full blocks, of which the first ranks have one more if need be.

    8 over 3: 3, 3, 2; 8 over 3 in blocks of 3: 3, 3, 2; 10 over 2 in blocks of 4: 8, 2.
    """
    blocks = -(-total // block)
    shares = (blocks // ranks + (rank < blocks % ranks) for rank in range(ranks))
    borders = (min(end * block, total) for end in accumulate(shares, initial=0))
    return [after - before for before, after in pairwise(borders)]
