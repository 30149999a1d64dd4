"""Programs through Inductor have the gradients of the ops' own kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxdp
from fxdp.ir.tensor_difference import difference
from fxdp.lowering.inductor.decomposition_overrides import OVERRIDES, mended
from tests.fallbacks import no_fallback
from tests.rank_pool import RankPool
from tests.zoo.entry import Entry
from tests.zoo.public import public_error

aten = torch.ops.aten

_CASES = [
    # size, kernel, stride, padding
    (1, 40, 40, 0), (5, 2, 2, 0), (6, 3, 2, 1), (7, 4, 3, 2), (4, 2, 2, 0), (5, 3, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("count_include_pad", [True, False])
@pytest.mark.parametrize("ceil_mode", [True, False])
@pytest.mark.parametrize("case", _CASES)
@pytest.mark.parametrize("dims", [2, 3])
def test_spelled_out_it_is_the_same(
    case: tuple[int, int, int, int], ceil_mode: bool, count_include_pad: bool, dims: int
) -> None:
    size, *numbers = case
    if size + 2 * numbers[2] < numbers[0] and (dims == 3 or not ceil_mode):
        pytest.skip("no such pool")
    kernel, stride, padding = ([n] * dims for n in numbers)
    value = torch.randn(2, 3, *[size] * dims, dtype=torch.float64)
    forward, op = (
        (aten.avg_pool2d.default, aten.avg_pool2d_backward.default)
        if dims == 2
        else (aten.avg_pool3d.default, aten.avg_pool3d_backward.default)
    )
    given: tuple[Any, ...] = kernel, stride, padding, ceil_mode, count_include_pad
    gradient = torch.randn_like(forward(value, *given))
    assert difference(OVERRIDES[op](gradient, value, *given), op(gradient, value, *given, None)) <= 1e-12


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.pool = nn.Sequential(nn.AvgPool2d(2, ceil_mode=True), nn.AvgPool2d(7, ceil_mode=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.conv(x)).tanh().sum()


def test_windows_that_end_outside_have_their_own_gradient() -> None:
    torch.manual_seed(0)
    model, x = Pooled().double(), torch.randn(2, 3, 5, 5, dtype=torch.float64)
    model(x).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with no_fallback():
        fxdp.compile(model)(x).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert difference(parameter.grad, gradient) <= 1e-12


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 12, 3, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().sum()


def _fails_on_no_images() -> bool:
    """Whether plain torch's compiled code stops at the backward of a convolution of an empty batch."""
    model = Strided()
    try:
        torch.compile(model, dynamic=False)(torch.randn(0, 3, 16, 16)).backward()
    except AssertionError as error:
        return "convolution_backward" in str(error)
    return False


def test_torch_still_fails_on_no_images() -> None:
    torch._dynamo.reset()
    assert _fails_on_no_images(), f"torch {torch.__version__} needs no mend of convolution_backward any more"


def _images(batch: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch, 3, 16, 16)}


def _error_of_four_and_none() -> float:
    return public_error(Entry(Strided, _images), splits=((4, 0), (1, 2)))


def test_a_rank_whose_first_batch_has_no_images(ranks: RankPool) -> None:
    assert max(ranks.run(2, _error_of_four_and_none)) <= 1e-12


def test_only_an_empty_batch_of_images_is_spelled_out() -> None:
    op = aten.convolution_backward.default
    image, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    assert mended(op, (torch.randn(2, 4, 6, 6), image, weight)) is None
    given = torch.randn(0, 4, 6, 6), image[:0], weight, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    instead = mended(op, given)
    assert instead is not None
    for mask in ([True, True, True], [False, True, False]):
        for found, expected in zip(instead(*given, mask), op(*given, mask), strict=True):
            assert (found is None) == (expected is None)
            assert found is None or found.equal(expected)
