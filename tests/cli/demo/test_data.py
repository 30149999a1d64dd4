"""The batches: the same on every rank, and entire when put together."""

from __future__ import annotations

import pytest
import torch

from fxdp.cli.demo.data import text, text_batch


def test_the_text_is_english() -> None:
    assert len(text()) > 300_000
    assert bytes(text().tolist()).count(b" the ") > 1_000


def test_a_target_is_the_next_byte() -> None:
    batch = text_batch(0, 3, 10)
    assert batch.tokens.shape == batch.targets.shape == (3, 10)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_a_step_is_the_same_for_all_and_another_than_the_next() -> None:
    assert torch.equal(text_batch(4, 3, 10).tokens, text_batch(4, 3, 10).tokens)
    assert not torch.equal(text_batch(4, 3, 10).tokens, text_batch(5, 3, 10).tokens)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_the_parts_are_the_whole(ranks: int) -> None:
    batch = text_batch(0, 5, 10)
    parts = [batch.part(rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)


def test_parts_differ_by_one_row_at_most() -> None:
    batch = text_batch(0, 7, 10)
    assert [len(batch.part(rank, 3).tokens) for rank in range(3)] == [3, 2, 2]
