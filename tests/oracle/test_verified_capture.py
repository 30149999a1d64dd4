"""Which copy of a model is verified: in float64 where that says something, else in its own types."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxdp


class Masked(nn.Module):
    """As CANINE's attention: in float64 the mask is `0 * inf`, and everything behind it nan."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.fc(x)
        return (scores + (1.0 - mask.float()) * torch.finfo(scores.dtype).min).softmax(-1).square().mean()


class Missing(nn.Module):
    """Its results are nan in any type where an input is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_a_copy_whose_results_are_nan_is_not_what_is_verified() -> None:
    mask = torch.tensor([[1, 1, 1, 0]] * 6)
    report = fxdp.verify(Masked(), (torch.randn(6, 4), mask), mesh={"dp": 2})
    assert report.ok
    assert 0 < report.worst < 1e-5
    assert "in the model's own types, because it fails in float64 (its results are nan)" in report.compared


def test_results_that_are_nan_in_any_type_are_compared_in_float64() -> None:
    x = torch.randn(6, 4)
    x[1, 2] = float("nan")
    report = fxdp.verify(Missing(), (x,), mesh={"dp": 2})
    assert report.ok
    assert "float64" in report.compared
    assert "own types" not in report.compared
