"""Ranks that part are told so at once, with both lines; what is small is read by one rank alone."""

from __future__ import annotations

import torch
import torch.distributed as dist

import fxdp
from tests.rank_pool import RankPool


def _part() -> str:
    x = fxdp.global_batch(torch.ones(2, 2000))
    total = x.sum(0)  # so large a sum is reduced when it is read
    try:
        if dist.get_rank():
            x.full()
        else:
            total.full()
    except fxdp.AgreementError as error:
        return str(error)
    return "no error"


def test_ranks_at_different_messages_are_named_by_line(ranks: RankPool) -> None:
    for words in ranks.run(2, _part):
        assert words.count("test_order.py:") == 2, words
        assert "rank 0 is at all_reduce of [2000] for full() at" in words
        assert "rank 1 is at all_gather of [B, 2000] for full() at" in words
        assert "expected all ranks to make the same calls" in words
    ranks.renew()
