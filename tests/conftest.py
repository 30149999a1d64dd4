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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n 2 --dist loadgroup`, tests that share rank processes run one after the other in one worker."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers in each test, whatever ran before it."""
    torch.manual_seed(0)
