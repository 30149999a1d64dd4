"""Positions of rows from the numbers of rows of all ranks."""

from __future__ import annotations

from random import Random

import pytest
import torch

from fxdp.ir.ops import exchanged_sizes


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_where_the_parts_say(seed: int) -> None:
    """Each row is tagged by (part, rank, number), and compared with the tags laid out in both orders."""
    draw = Random(seed)
    parts, world = 1 + seed % 3, 1 + seed % 4
    counts = [[draw.choice([0, 0, 1, 3, 5]) for _ in range(parts)] for _ in range(world)]
    tags = {(part, rank): [(part, rank, i) for i in range(counts[rank][part])]
            for part in range(parts) for rank in range(world)}  # fmt: skip
    own = [[tag for part in range(parts) for tag in tags[part, rank]] for rank in range(world)]
    full = [tag for of in tags.values() for tag in of]
    largest = max(map(len, own))
    padded = [row for rows in own for row in rows + [None] * (largest - len(rows))]
    for rank, vector in enumerate(exchanged_sizes.of_ranks(counts, ())):
        before = [sum(one[part] for one in counts[:rank]) for part in range(parts)]
        assert vector[:parts].tolist() == before
        assert vector[2 * parts] == largest
        rows = torch.ops.fxdp.gathered_rows(vector, parts, len(full))
        assert [padded[row] for row in rows.tolist()] == full
        mine = torch.ops.fxdp.own_rows(vector, counts[rank])
        assert [full[row] for row in mine.tolist()] == own[rank]
