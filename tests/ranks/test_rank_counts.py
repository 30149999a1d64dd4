"""A number of ranks that a module keeps is told, wherever the module runs."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxdp
from fxdp.ranks.rank_counts import warn_of_rank_counts
from tests.rank_pool import RankPool


def test_only_attributes_that_are_named_so_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.depth, model[0].world_size, model[1].n_gpu = 2, 2, 4  # type: ignore[assignment]
    warn_of_rank_counts(model, 1)
    assert not caplog.records
    warn_of_rank_counts(model, 2)
    assert [record.message.split(" of the model")[0] for record in caplog.records] == ["0.world_size"]


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.world_size, self.depth = nn.Linear(3, 2), dist.get_world_size(), 2

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) * self.depth).mean() * self.world_size


def _lines() -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fxdp")
    log.addHandler(handler)
    torch.manual_seed(0)
    for _ in range(2):
        _Scaled()(fxdp.global_batch(torch.ones(2, 3)))
    log.removeHandler(handler)
    return [line for line in found if "the number of ranks" in line]


def test_an_uncompiled_loss_times_the_number_of_ranks_is_told_once(ranks: RankPool) -> None:
    for found in ranks.run(2, _lines):
        assert [line.partition(" is 2")[0] for line in found] == ["world_size of _Scaled"], found
