"""Fresh memory is poisoned: an op that leaves a result unwritten, say a sum over no sample, shows as nan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)  # what makes torch fill new memory with nan
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/rules" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore:.*does not have a deterministic"))
