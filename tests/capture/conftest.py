from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _float64(float64: None) -> None:
    """Everything in float64."""
