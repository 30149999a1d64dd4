"""The ranks' parts together are one device's batches."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, default_collate

from fxdp.integrations.batch_parts import BatchParts, PartCollate, emptied

Pair = namedtuple("Pair", ["x", "y"])


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_parts_are_one_devices_batches(count: int, size: int, world: int, split: bool, drop: bool) -> None:
    batches = BatchSampler(range(count), size, drop_last=drop)
    own = [BatchParts(batches, rank, world, split) for rank in range(world)]
    whole = size if split else size * world
    expected = list(BatchSampler(range(count), whole, drop_last=drop))
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
