"""Twelve models of the catalogue for torches that are not the pinned one; `.ci/core` runs them.

No `test_...`: with the pinned torch others show the same, faster (`test_zoo.py`, `tests/exactness/`).
"""

from __future__ import annotations

import pytest

from tests.zoo.catalogue import CATALOGUE
from tests.zoo.measure import measure

SPLITS = ((4, 3), (5, 2, 0, 1))
MODELS = (
    "gpt2", "llama", "bert", "t5", "xlnet", "wav2vec2", "vit_mae", "patchtst", "mixtral", "resnet",
    "convnext", "longformer",
)  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_one_device(name: str) -> None:
    measured = measure(CATALOGUE[name], "train", SPLITS)
    assert set(measured.errors) == {str(split) for split in SPLITS}
    assert max(measured.errors.values()) <= 1e-9
    assert not measured.fallbacks
