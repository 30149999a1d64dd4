"""Unmodified transformers models, captured at one batch size and compared at another."""

from __future__ import annotations

import pytest
import torch

from . import zoo
from .oracle import check


@pytest.mark.parametrize("name", zoo.ZOO)
def test_equals_eager(name: str) -> None:
    torch.set_default_dtype(torch.float32)
    model = zoo.make(name)
    torch.set_default_dtype(torch.float64)
    inputs = zoo.ZOO[name][1]
    with zoo.keep_float64():
        captured = check(model, (), inputs(3), ((), inputs(4)))
    assert not captured.static
    assert not captured.conditions


def test_single_sample() -> None:
    torch.set_default_dtype(torch.float32)
    model = zoo.make("gpt2")
    torch.set_default_dtype(torch.float64)
    inputs = zoo.ZOO["gpt2"][1]
    with zoo.keep_float64():
        check(model, (), inputs(1), ((), inputs(4)))
