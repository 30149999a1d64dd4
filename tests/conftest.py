"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Rank processes, shared by the whole session (see tests/ranks.py)."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers in each test, whatever ran before it."""
    torch.manual_seed(0)
