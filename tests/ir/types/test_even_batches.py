from __future__ import annotations

from fxdp.ir.types.even_batches import even_batches


def test_ranks_hold_full_blocks() -> None:
    assert even_batches(8, 3) == [3, 3, 2]
    assert even_batches(10, 2, 4) == [8, 2]
    assert even_batches(8, 3, 3) == [3, 3, 2]
    assert even_batches(4, 3, 4) == [4, 0, 0]
    assert even_batches(0, 2) == [0, 0]
