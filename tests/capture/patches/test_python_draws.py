"""Random numbers of Python and NumPy in a forward, of torch where Python decides by them, and seeding."""

from __future__ import annotations

import os
import random
import secrets
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.capture.patches.python_draws import Drawn, python_draws
from fxdp.errors import CaptureError
from fxdp.torch_compat import patched
from tests.capture.oracle import check
from tests.capturing import capture


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


def _asks_the_system(x: Tensor, rate: float) -> Tensor:
    return x * os.urandom(1)[0]


def _keeps_a_secret(x: Tensor, rate: float) -> Tensor:
    return x * secrets.randbelow(8)


def _names_itself(x: Tensor, rate: float) -> Tensor:
    return x * (uuid.uuid4().int % 8)


def _begins_anywhere(x: Tensor, rate: float) -> Tensor:
    return x * float(np.random.default_rng().random())


_OF_PYTHON = [_skips_a_layer, _flips, _scales, _adds, _masks, _chooses]
_OF_THE_SYSTEM = [_asks_the_system, _keeps_a_secret, _names_itself, _begins_anywhere]


@pytest.mark.parametrize("body", [*_OF_PYTHON, *_OF_THE_SYSTEM])
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
    with patched(python_draws([])):
        assert isinstance(random.random(), Drawn)
        assert random.Random(0).random() == 0.8444218515250481
        assert np.random.RandomState(0).rand() == pytest.approx(0.5488135039273248)
    assert (dict(vars(random)), dict(vars(np.random))) == before


class LayerDrop(nn.Module):
    """Asks in the four ways whether to skip a layer, then drops elements."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.dropout, self.probability = nn.Dropout(0.5), probability

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.layers
        if torch.rand([]) >= self.probability:
            x = first(x)
        skip = self.training and (torch.rand(1) < self.probability)
        x = x if skip else second(x)
        if not torch.rand(()) <= self.probability - 1e-9:
            x = third(x)
        x = torch.where(torch.rand([]) > self.probability - 1e-9, fourth(x), x)
        return self.dropout(x).square().mean()


@pytest.mark.parametrize("probability", [0.0, 1.0 + 1e-6])
def test_the_way_is_taken_and_all_numbers_are_drawn(probability: float) -> None:
    report = fxdp.verify(LayerDrop(probability), (torch.randn(4, 4),), mesh={"dp": 2}, rng="single-device")
    assert report.ok, report


def test_between_them_it_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"`if torch.rand.* >= self.probability:`.*Switch off what draws"):
        fxdp.verify(LayerDrop(0.1), (torch.randn(4, 4),), mesh={"dp": 2})


OWN = torch.Generator().manual_seed(1)


class _Drawing(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc(x))


def _seeds_torch(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(x)


def _forks(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        noise = torch.randn_like(x)
    return x * noise


def _rewinds(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.randn_like(x)
    torch.set_rng_state(state)
    return x * noise + F.dropout(x)


OWNED: dict[str, Callable[[Tensor], Tensor]] = {
    "held": lambda x: x * torch.randn(x.shape, generator=OWN),
    "made": lambda x: x * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)),
    "in_place": lambda x: x * torch.empty_like(x).normal_(generator=OWN),
    "by_value": lambda x: x * torch.bernoulli(x.sigmoid(), generator=OWN),
    "shuffled": lambda x: x[torch.randperm(len(x), generator=OWN)],
    "initialized": lambda x: x * nn.init.uniform_(torch.empty_like(x), generator=OWN),
}


@pytest.mark.parametrize("name", OWNED)
def test_draws_from_a_generator_of_the_models_own_are_refused(name: str) -> None:
    said = r"test_python_draws.py:\d+ `.*draws from a generator of the model's own.*register_buffer"
    with pytest.raises(CaptureError, match=said):
        capture(_Drawing(OWNED[name]), (torch.randn(8, 4),), {})


@pytest.mark.parametrize("body", [_seeds_torch, _forks, _rewinds])
def test_seeding_what_the_forward_draws_from_is_refused(body: Callable[[Tensor], Tensor]) -> None:
    said = r"test_python_draws.py:\d+ `.*calls torch(.random)?.(manual_seed|fork_rng|set_rng_state) and draws"
    with pytest.raises(CaptureError, match=said):
        capture(_Drawing(body), (torch.randn(8, 4),), {})


def _seeds_for_nothing(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(x, training=False)


def _names_the_default(x: Tensor) -> Tensor:
    return x * torch.randn(x.shape, generator=torch.default_generator) + torch.rand(x.shape, generator=None)


@pytest.mark.parametrize("body", [_seeds_for_nothing, _names_the_default])
def test_torchs_own_generator_is_what_a_program_draws_from(body: Callable[[Tensor], Tensor]) -> None:
    if body is _seeds_for_nothing:
        assert not capture(_Drawing(body), (torch.randn(8, 4),), {}).conditions
    else:
        check(_Drawing(body), (torch.randn(8, 4),))


def _takes_one(x: Tensor, rate: float) -> Tensor:
    """torchvision's detectors: one of the sizes of an image, of which there may be one."""
    sizes = [2, 3][: 1 + round(rate)]
    index = int(torch.empty(1).uniform_(0.0, float(len(sizes))).item())
    return F.dropout(x[:, : sizes[index]], 0.5)


def test_an_integer_that_is_the_same_whatever_is_drawn() -> None:
    check(_Model(_takes_one, 0.0), (torch.randn(8, 4),))
    with pytest.raises(CaptureError, match="data-dependent control flow"):
        capture(_Model(_takes_one, 1.0), (torch.randn(8, 4),), {})


def _grown_draw(x: Tensor, rate: float) -> Tensor:
    drawn = torch.rand(1)
    drawn *= 5
    return x if drawn < 1 else -x


def test_a_draw_that_is_written_is_no_longer_between_0_and_1() -> None:
    with pytest.raises(CaptureError, match="data-dependent control flow"):
        capture(_Model(_grown_draw), (torch.randn(8, 4),), {})
