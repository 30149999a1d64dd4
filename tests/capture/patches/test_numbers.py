"""Buffers whose values the model's code reads in Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.errors import CaptureError

BATCH = torch.Generator().manual_seed(0)


class Padded(nn.Module):
    """Sizes and switches in buffers, as transformers' codecs keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3, stride=2)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("stride", torch.tensor(2), persistent=False)
        self.register_buffer("switches", torch.tensor([1.0, 0.0]))
        self.register_buffer("order", torch.arange(100))

    def forward(self, x: Tensor) -> Tensor:
        missing = torch.ceil((x.shape[-1] - 3) / self.stride).to(torch.int64) * self.stride + 3 - x.shape[-1]
        if missing > 0:
            x = F.pad(x, (0, missing))  # type: ignore[list-item]
        if self.switches[0] > 0:
            x = 2 * x
        x = x[:, self.order[:2].flip(0)]
        return self.norm(self.conv(x)).relu().square().mean()  # type: ignore[no-any-return]


class Counted(nn.Module):
    """Reads a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(x).mean() * (2 if self.steps > 1 else 1)  # type: ignore[no-any-return]


def _x() -> Tensor:
    return torch.randn(4, 2, 8, generator=BATCH)


def test_ranks_equal_one_device() -> None:
    assert fxdp.verify(Padded(), (_x(),), mesh={"dp": 2}).ok


def test_a_buffer_with_another_value_is_captured_anew() -> None:
    model = Padded()
    compiled = fxdp.compile(model, compute="eager")
    for switches in ([1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 5.0]):
        model.switches.copy_(torch.tensor(switches))  # type: ignore[operator]
        x = _x()
        expected = model(x)
        torch.testing.assert_close(compiled(x), expected)


def test_a_buffer_that_the_forward_writes_is_no_number() -> None:
    with pytest.raises(CaptureError, match=r"test_numbers.py:\d+ `return .*self.steps > 1.*data-dependent"):
        fxdp.compile(Counted(), compute="eager")(torch.randn(4, 2))
