"""Loaders of a script: ranks that load their own samples alone have one data set."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset, default_collate

from fxdp.eager.data_ranks import data_ranks
from fxdp.errors import InputError
from fxdp.run.generators import share
from fxdp.run.loaders import entered, fetched
from fxdp.run.session import RunOptions, Session
from fxdp.torch_compat import MapFetcher
from tests.rank_pool import RankPool


def _first(differ: float) -> Any:
    """Load a batch of a data set that differs between ranks by a number; return its values, or the error."""
    ranks = data_ranks(None, "cpu")
    share(ranks)
    session = Session(ranks, RunOptions(""))
    data = TensorDataset(torch.arange(5.0) + differ * ranks.rank)
    batch = fetched(MapFetcher.fetch, MapFetcher(data, True, default_collate, False), [3, 1, 4], session)
    try:
        return entered(batch, session)[0].full().tolist()
    except InputError as error:
        return str(error)


def test_ranks_with_other_data_are_told_at_the_first_batch(ranks: RankPool) -> None:
    assert ranks.run(2, _first, 0.0) == [[3, 1, 4]] * 2
    for words in ranks.run(2, _first, 0.5):
        assert "ranks [1] have another batch than rank 0" in words
