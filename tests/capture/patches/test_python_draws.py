"""Random numbers of Python and NumPy in a forward."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxdp.capture import capture
from fxdp.capture.patches.python_draws import Drawn, refused_draws
from fxdp.errors import CaptureError
from tests.capture.oracle import check


class _Model(nn.Module):
    def __init__(self, body: Callable[[Tensor, float], Tensor], rate: float = 0.5) -> None:
        super().__init__()
        self.fc, self.body, self.rate = nn.Linear(4, 4), body, rate

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc(x), self.rate).square().mean()


def _skips_a_layer(x: Tensor, rate: float) -> Tensor:
    drawn, other = np.random.random(), random.uniform(0, 1)
    return x if drawn < rate or other <= rate - 1 or np.random.rand() > 1 - rate else x.tanh()


def _flips(x: Tensor, rate: float) -> Tensor:
    return x.flip(1) if random.random() > rate else x


def _scales(x: Tensor, rate: float) -> Tensor:
    return x * random.uniform(0.8, 1.2)


def _adds(x: Tensor, rate: float) -> Tensor:
    return x + 2 * np.random.rand()


def _masks(x: Tensor, rate: float) -> Tensor:
    return x * torch.from_numpy(np.random.rand(4))


def _chooses(x: Tensor, rate: float) -> Tensor:
    return x[:, random.randint(0, 3)]


@pytest.mark.parametrize("body", [_skips_a_layer, _flips, _scales, _adds, _masks, _chooses])
def test_what_decides_is_refused_with_its_line(body: Any) -> None:
    with pytest.raises(
        CaptureError, match=r"test_python_draws.py:\d+ `.*draws a random number in Python.*input"
    ):
        capture(_Model(body), (torch.randn(8, 4),), {})


@pytest.mark.parametrize("rate", [0.0, 2.0])
def test_what_decides_nothing_is_captured(rate: float) -> None:
    """A layer drop of zero; the numbers that the user draws later are what they were."""
    before = random.getstate(), np.random.get_state()[2]
    check(_Model(_skips_a_layer, rate), (torch.randn(8, 4),))
    assert (random.getstate(), np.random.get_state()[2]) != before  # eager draws them


def _seeds(x: Tensor, rate: float) -> Tensor:
    np.random.seed(3)
    random.seed(4)
    return x[:, np.random.permutation(4)] * random.random()


def test_what_the_forward_seeds_is_the_same_at_each_step() -> None:
    check(_Model(_seeds), (torch.randn(8, 4),))


def test_python_is_as_before() -> None:
    before = dict(vars(random)), dict(vars(np.random))
    with refused_draws():
        assert isinstance(random.random(), Drawn)
        assert random.Random(0).random() == 0.8444218515250481
        assert np.random.RandomState(0).rand() == pytest.approx(0.5488135039273248)
    assert (dict(vars(random)), dict(vars(np.random))) == before
