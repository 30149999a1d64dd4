"""Ranks that part are told so at once, with both lines; what is small is read by one rank alone."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

import fxdp
from tests.limits import HANG_S
from tests.rank_pool import RankPool

_CONNECTIONS: list[weakref.ref[Any]] = []
"""Of a rank's earlier task, whose process group has ended."""


def _steps() -> None:
    from fxdp.eager.data_ranks import data_ranks

    layer = torch.nn.Linear(3, 2)
    x = fxdp.global_batch(torch.ones(2, 3))
    layer(x).sum().backward()
    comms = data_ranks(None, "cpu").process_mesh.comms
    assert comms is not None
    _CONNECTIONS.append(weakref.ref(comms))


def _are_gone() -> bool:
    gc.unfreeze()  # the pool freezes what a task leaves, before the watch has ended
    end = time.monotonic() + HANG_S / 10
    while any(found() is not None for found in _CONNECTIONS) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.1)  # the watch looks once a second whether the group is there
    return all(found() is None for found in _CONNECTIONS)


def test_connections_go_with_the_process_group(ranks: RankPool) -> None:
    ranks.run(2, _steps)
    assert ranks.run(2, _are_gone) == [True, True]


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
