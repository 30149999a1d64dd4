"""Generators of the user's in a forward: refused where they draw, as a graph holds and seeds none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxdp.capture import capture
from fxdp.errors import CaptureError
from tests.capture.oracle import check

OWN = torch.Generator().manual_seed(1)


class _Model(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc(x))


def _seeds(x: Tensor) -> Tensor:
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
    said = r"test_generators.py:\d+ `.*draws from a generator of the model's own.*register_buffer"
    with pytest.raises(CaptureError, match=said):
        capture(_Model(OWNED[name]), (torch.randn(8, 4),), {})


@pytest.mark.parametrize("body", [_seeds, _forks, _rewinds])
def test_seeding_what_the_forward_draws_from_is_refused(body: Callable[[Tensor], Tensor]) -> None:
    said = r"test_generators.py:\d+ `.*calls torch(.random)?.(manual_seed|fork_rng|set_rng_state) and draws"
    with pytest.raises(CaptureError, match=said):
        capture(_Model(body), (torch.randn(8, 4),), {})


def _seeds_for_nothing(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(x, training=False)


def _names_the_default(x: Tensor) -> Tensor:
    return x * torch.randn(x.shape, generator=torch.default_generator) + torch.rand(x.shape, generator=None)


@pytest.mark.parametrize("body", [_seeds_for_nothing, _names_the_default])
def test_torchs_own_generator_is_what_a_program_draws_from(body: Callable[[Tensor], Tensor]) -> None:
    if body is _seeds_for_nothing:
        assert not capture(_Model(body), (torch.randn(8, 4),), {}).conditions
    else:
        check(_Model(body), (torch.randn(8, 4),))
