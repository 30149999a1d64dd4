"""An op with a fault: its bits depend on the samples that the rank has had before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.rules.registry import registry

_SEEN: list[int] = []
"""The samples of earlier calls."""


@torch.library.custom_op("fxdp_tests::drifting", mutates_args=())
def drifting(x: Tensor) -> Tensor:
    """Return x, a little larger with each sample."""
    _SEEN.append(len(x))
    return x * (1 + sum(_SEEN) * 2**-22)


drifting.register_fake(torch.empty_like)
drifting.register_autograd(lambda ctx, grad: grad)


@pytest.fixture
def drifting_rule() -> Iterator[None]:
    """Give the op a rule, as its author would."""
    fxdp.register_rule(drifting, pointwise=True)
    _SEEN.clear()
    yield
    registry.remove(torch.ops.fxdp_tests.drifting)


class Drifting(nn.Module):
    """A loss behind the op."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return drifting(self.layer(x)).square().mean()
