"""A forked child, as a data loader's worker, is no rank."""

from __future__ import annotations

import os
import sys
import warnings

import torch
from torch import nn

import fxdp
from tests.rank_pool import RankPool


def _fork_and_exit() -> tuple[float, int]:
    compiled = fxdp.compile(nn.Linear(3, 1), loss_fn=nn.MSELoss(), backend="eager")
    x, y = torch.ones(2, 3), torch.ones(2, 1)
    compiled(x, target=y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork
        child = os.fork()
    if child == 0:
        import atexit

        atexit._run_exitfuncs()  # what sys.exit would do
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    loss = compiled(x, target=y)
    loss.backward()
    return loss.item(), status


def test_the_end_of_a_child_is_not_that_of_its_rank(ranks: RankPool) -> None:
    assert sys.platform != "win32"
    results = ranks.run(2, _fork_and_exit)
    assert results[0] == results[1]
    assert results[0][1] == 0
