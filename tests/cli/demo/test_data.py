"""The batches: the same on every rank, and entire when put together."""

from __future__ import annotations

import pytest
import torch

from fxdp.cli.demo.data import Corpus, share


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.from_standard_library()


def test_the_text_is_english(corpus: Corpus) -> None:
    assert len(corpus.text) > 300_000
    assert bytes(corpus.text.tolist()).count(b" the ") > 1_000


def test_a_target_is_the_next_byte(corpus: Corpus) -> None:
    batch = corpus.batch(0, 3, 10)
    assert batch.tokens.shape == batch.targets.shape == (3, 10)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_a_step_is_the_same_for_all_and_another_than_the_next(corpus: Corpus) -> None:
    assert torch.equal(corpus.batch(4, 3, 10).tokens, corpus.batch(4, 3, 10).tokens)
    assert not torch.equal(corpus.batch(4, 3, 10).tokens, corpus.batch(5, 3, 10).tokens)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_the_parts_are_the_whole(corpus: Corpus, ranks: int) -> None:
    batch = corpus.batch(0, 5, 10)
    parts = [batch.part(rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)


def test_shares_differ_by_one_row_at_most() -> None:
    sizes = [part.stop - part.start for part in (share(7, rank, 3) for rank in range(3))]
    assert sizes == [3, 2, 2]
