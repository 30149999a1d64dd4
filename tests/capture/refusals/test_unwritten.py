"""Memory that nothing has written is refused where its values are computed with, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxdp.errors import CaptureError
from tests.capturing import capture
from tests.lockstep import check

X = torch.randn(7, 4, dtype=torch.float64)


class _Model(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4).double(), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc(x)).square().mean()


def _scaled(x: Tensor) -> Tensor:
    return x * torch.empty(4)


def _seen(x: Tensor) -> Tensor:
    return x + torch.empty_like(x).view(-1).view_as(x)


def _summed(x: Tensor) -> Tensor:
    return x * torch.cat([x.new_empty(2), x.new_zeros(2)]).sum()


@pytest.mark.parametrize("body", [_scaled, _seen, _summed])
def test_refused(body: Callable[[Tensor], Tensor]) -> None:
    words = r"test_unwritten.py:\d+.*reads memory that nothing has written since .*test_unwritten.py:\d+"
    with pytest.raises(CaptureError, match=words):
        capture(_Model(body), (X,), {})


def _filled(x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    made[:] = x
    return made * x.new_empty(3, 4).fill_(2.0)[0]


def _in_parts(x: Tensor) -> Tensor:
    made = x.new_empty(x.shape[0], 8)
    made[:, :4], made[:, 4:] = x, 2 * x
    return made.sin()


def _of_nothing(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_empty(x.shape[0], 0)], 1)


def _undefined_gradients(x: Tensor) -> Tensor:
    product = torch.baddbmm(torch.empty(1, 4, 4), x.new_ones(1, 4, 2), x.new_ones(1, 2, 4), beta=0)
    return x * product.sum()


@pytest.mark.parametrize("body", [_filled, _in_parts, _of_nothing, _undefined_gradients])
def test_exact(body: Callable[[Tensor], Tensor]) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        check(_Model(body), (X,), splits=[(5, 2, 0), (4, 3)])
    finally:
        torch.set_default_dtype(default)
