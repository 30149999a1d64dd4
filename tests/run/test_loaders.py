"""Loaders of a script: ranks that load their own samples alone have one data set."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from fxdp.eager.data_ranks import data_ranks
from fxdp.errors import InputError
from fxdp.run.generators import share
from fxdp.run.loaders import GlobalBatches, entered, fetched
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


def _collated(samples: list[Any]) -> Any:
    """Load a batch of all samples; return its dtype and values, or the name of the error."""
    ranks = data_ranks(None, "cpu")
    share(ranks)
    session = Session(ranks, RunOptions(""))
    fetcher = MapFetcher(samples, True, default_collate, False)
    batch = fetched(MapFetcher.fetch, fetcher, list(range(len(samples))), session)
    try:
        found = next(GlobalBatches(iter([batch]), DataLoader(samples), session))
    except RuntimeError as error:
        return type(error).__name__
    return str(found.dtype), found.full().tolist()


def test_samples_that_differ_between_ranks_are_collated_as_on_one_device(ranks: RankPool) -> None:
    """The ranks' own samples are of two dtypes; of two shapes, which do not collate."""
    numbers = [1, 2, 3.5]
    wide = [torch.zeros(2), torch.zeros(2), torch.ones(2, dtype=torch.float64) / 3]
    for samples in (numbers, wide):
        plain = default_collate(samples)
        assert ranks.run(2, _collated, samples) == [(str(plain.dtype), plain.tolist())] * 2
    for lengths in ((2, 2, 3), (2, 3, 3)):  # the second fails to load on rank 0 alone
        assert ranks.run(2, _collated, [torch.zeros(length) for length in lengths]) == ["RuntimeError"] * 2
