"""The ranks' parts together are one device's batches."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Iterator
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, default_collate

import fxdp
from fxdp.integrations.batch_parts import BatchParts, PartCollate, emptied, loader_of_parts
from tests.rank_pool import RankPool

Pair = namedtuple("Pair", ["x", "y"])


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_parts_are_one_devices_batches(count: int, size: int, world: int, split: bool, drop: bool) -> None:
    batches = BatchSampler(range(count), size, drop_last=drop)
    own = [BatchParts(batches, rank, world, split) for rank in range(world)]
    full = size if split else size * world
    expected = list(BatchSampler(range(count), full, drop_last=drop))
    parts = list(zip(*own, strict=True))
    assert [[i for part in batch for i in part] for batch in parts] == expected
    assert all(len(one) == len(expected) for one in own)
    assert all(max(map(len, batch)) - min(map(len, batch)) <= 1 for batch in parts)


def test_the_sampler_can_be_exchanged() -> None:
    parts = BatchParts(BatchSampler(range(4), 2, drop_last=False), 1, 2)
    assert parts.sampler == range(4)
    parts.sampler = range(4, 8)
    assert list(parts) == [[6, 7]]


def test_a_batch_of_nothing() -> None:
    more = torch.ones(2), torch.ones(1)
    dataset = [{"x": torch.ones(3), "y": torch.tensor(2), "name": "a", "more": more}]
    collate = PartCollate(default_collate, dataset)
    assert collate(dataset * 2)["y"].tolist() == [2, 2]
    empty = collate([])
    assert empty["x"].shape == (0, 3)
    assert empty["y"].dtype == torch.long
    assert empty["name"] == []
    assert [tuple(t.shape) for t in empty["more"]] == [(0, 2), (0, 1)]


@pytest.mark.parametrize("batch", [Pair(torch.ones(1, 2), torch.ones(1)), (torch.ones(1, 2), torch.ones(1))])
def test_a_tuple_stays_one(batch: tuple[torch.Tensor, ...]) -> None:
    empty = emptied(batch)
    assert type(empty) is type(batch)
    assert [len(t) for t in empty] == [0, 0]
    assert emptied(torch.tensor(3)) == 3
    assert emptied("mean") == "mean"


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def _epochs() -> tuple[list[list[list[int]]], str]:
    torch.manual_seed(dist.get_rank())  # the first rank's order counts
    loader = DataLoader(range(9), 4, shuffle=True)  # type: ignore[var-annotated,arg-type]
    parts = loader_of_parts(loader)
    try:
        loader_of_parts(DataLoader(_Stream(), 4))
    except fxdp.InputError as error:
        return [[batch.tolist() for batch in parts] for _ in range(2)], str(error)
    return [], ""


def test_a_loader_gives_each_rank_its_part_of_rank_0s_batches(ranks: RankPool) -> None:
    (first, said), (second, _) = ranks.run(2, _epochs)
    assert "expected a dataset with a length" in said
    for one, other in zip(first, second, strict=True):
        assert [len(batch) for batch in one] == [2, 2, 1]
        assert [len(batch) for batch in other] == [2, 2, 0]
        assert sorted(chain(*one, *other)) == list(range(9))
    assert first[0] != first[1]


class _Noise(Dataset[float]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> float:
        return index + random.random()


def _noise() -> list[list[float]]:
    torch.manual_seed(3)
    random.seed(4)
    loader = DataLoader(_Noise(), 4, shuffle=True)
    if dist.is_initialized():
        loader = loader_of_parts(loader, all_samples=True)
    return [batch.tolist() for _ in range(2) for batch in loader]


def test_samples_that_draw_are_one_devices(ranks: RankPool) -> None:
    assert [a + b for a, b in zip(*ranks.run(2, _noise), strict=True)] == _noise()
