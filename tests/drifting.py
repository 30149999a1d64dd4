"""Ops whose bits depend on more than operands: on earlier samples of the rank, on where operands begin."""

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


@torch.library.custom_op("fxdp_tests::placed", mutates_args=())
def placed(x: Tensor) -> Tensor:
    """Return x, a little larger if it begins at no 64 bytes: as some kernels on some processors do."""
    return x * (1 + (x.data_ptr() % 64 != 0) * 2**-20)


placed.register_fake(torch.empty_like)
placed.register_autograd(lambda ctx, grad: grad)


@pytest.fixture
def drifting_rule() -> Iterator[None]:
    """Give the ops a rule, as their author would."""
    fxdp.register_rule(drifting, pointwise=True)
    fxdp.register_rule(placed, pointwise=True)
    _SEEN.clear()
    yield
    registry.remove(torch.ops.fxdp_tests.drifting, torch.ops.fxdp_tests.placed)


class Drifting(nn.Module):
    """A loss behind the op."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return drifting(self.layer(x)).square().mean()
