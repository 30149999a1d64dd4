"""Python numbers that a model computes from its batch size: they are those of the global batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxdp
from tests.exactness.cases import exact_body, in_fours, linear, rows

NUMBERS: dict[str, Callable[[int], float]] = {
    "quotient": lambda n: 1 / n,
    "rational": lambda n: (n - 1) / n,
    "of_two": lambda n: 2.5 / (n * n - 1),
    "share": lambda n: 0.5 * n,
    "root": lambda n: (n * 1.5) ** 0.5,
    "power": lambda n: 0.9**n + n**3,
    "full": lambda n: n // 2 + n % 3,
    "rounded": lambda n: round(0.3 * n) + math.floor(n / 4) + int(0.6 * n),
    "bounded": lambda n: max(n, 4) - min(n, 5),
}


@pytest.mark.parametrize("names", in_fours(NUMBERS), ids=" ".join)
def test_arithmetic(names: tuple[str, ...]) -> None:
    def body(fc: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        y = fc(x).square().sum()
        return tuple(y * NUMBERS[name](x.shape[0]) for name in names)

    exact_body(body, rows(), splits=((5, 2, 0, 1),))


FIXED: dict[str, Callable[[int], float]] = {
    "quotient": lambda n: 1 / n,
    "rational": lambda n: 1 - 2.0 / n,
    "of_two": lambda n: 2.5 / (n * n - 1),
    "share": lambda n: 0.3 * n,
    "float": lambda n: float(n),
    "root": lambda n: math.sqrt(n),
    "inverse_root": lambda n: 1 / math.sqrt(3 * n - 1),
}


@pytest.mark.parametrize("names", in_fours(FIXED), ids=" ".join)
def test_arithmetic_that_fixes_the_batch_size(names: tuple[str, ...]) -> None:
    """Fitted from several traces (`capture/joint/static.py`); a quotient must not become a integers."""

    def body(fc: nn.Linear, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        numbers = [FIXED[name](int(x.shape[0])) for name in names]
        y = fc(x).square().sum()
        return [(y * number, torch.full((3,), number) + y) for number in numbers]

    exact_body(body, rows(), splits=((5, 2, 0, 1),))


def test_numbers_that_are_returned() -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = linear()

        def forward(self, x: Tensor) -> tuple[object, ...]:
            n = x.shape[0]
            return self.fc(x).mean(), n, 1 / n, n * 0.5, n // 2, n > 4

    model = Sizes()
    compiled = fxdp.compile(model, backend="eager")
    for count in (8, 5):
        x = torch.randn(count, 10)
        got, expected = compiled(x)[1:], model(x)[1:]
        assert got == expected
        assert [type(value) for value in got] == [type(value) for value in expected]
