"""A parameter that is no attribute of the model trains nowhere in a program: it is refused by line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxdp.errors import CaptureError
from tests.capturing import capture

_SHARED = nn.Linear(4, 2).double()


class _Model(nn.Module):
    """`body(self, x)` with a layer, and others that are in plain containers."""

    def __init__(self, body: Callable[[_Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4), body
        self.heads = [nn.Linear(4, 2).double()]
        self.frozen = [nn.Linear(4, 2).double().requires_grad_(False)]
        self.again = {"fc": self.fc}
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.fc(x)).sum()


@pytest.mark.parametrize(
    "body",
    [
        lambda m, h: m.heads[0](h),
        lambda m, h: _SHARED(h),
        lambda m, h: h @ torch.cat([m.heads[0].weight, _SHARED.weight]).t(),
        lambda m, h: F.linear(h, weight=m.heads[0].weight),
    ],
    ids=["in a list", "a global", "in an argument that is a list", "by keyword"],
)
def test_refused_by_line(body: Callable[[_Model, Tensor], Tensor]) -> None:
    with pytest.raises(
        CaptureError, match=r"test_unregistered.py:\d+.*no.*gradient.*Register it.*ModuleList"
    ):
        capture(_Model(body), (torch.randn(7, 4).double(),), {})


def _read(m: _Model, h: Tensor) -> Tensor:
    with torch.no_grad():
        taught = _SHARED(h)
    return m.frozen[0](m.again["fc"](h)) + taught * m.heads[0].weight.detach().mean()


def test_what_gets_no_gradient_in_eager_either_is_read() -> None:
    capture(_Model(_read), (torch.randn(7, 4).double(),), {})
