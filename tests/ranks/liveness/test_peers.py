"""A rank that ends before it has called fxdp.compile is known to those that wait for it."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist
from torch import nn

import fxdp
from fxdp.errors import RankFailedError
from fxdp.ranks.liveness.peers import Peers
from tests.limits import scaled
from tests.rank_pool import RankPool


def _one_is_gone(late: int, gone: int) -> None:
    rank = dist.get_rank()
    if rank == gone:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == late:
        time.sleep(scaled(3.0))  # longer than the others ask for
    with pytest.raises(RankFailedError, match=f"rank {gone} failed: its process ended without an error"):
        fxdp.compile(nn.Linear(2, 2), backend="eager")


def test_ranks_that_wait_hear_of_it_and_who_is_only_late_is_not_meant(ranks: RankPool) -> None:
    outcomes = ranks.spawn(3, _one_is_gone, 2, 1)
    assert [outcome.status for outcome in outcomes] == [0, -9, 0], outcomes


def _asks_once() -> None:
    peers = Peers([0, 1], dist.get_rank(), lambda rank: False)
    peers.look()
    assert not peers._asked  # so early nobody is missed
    peers._first = 0.0
    for _ in range(3):
        peers.look()
    assert len(peers._asked) == 1
    dist.barrier()


def test_a_live_rank_is_asked_once(ranks: RankPool) -> None:
    assert all(outcome.status == 0 for outcome in ranks.spawn(2, _asks_once))
