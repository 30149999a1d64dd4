"""Small models from a function, and the splits on which each must be exact."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxdp.compiler.program import Program
from fxdp.reports.plan_data.collective_rows import communication
from fxdp.reports.rows import CommRow
from tests.lockstep import check

D = 10
"""The hidden size, the sequence length, the number of classes, and the largest global batch."""

SPLITS = ((4, 3), (3, 3), (10, 0), (5, 2, 0, 1), (3, 3, 2, 2), (0, 1, 0, 0))
"""Even and uneven, with empty ranks, and three empty of four."""


class Model(nn.Module):
    """`body(*layers, *inputs)`."""

    def __init__(self, body: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.layers = nn.ModuleList(layers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*self.layers, *args, **kwargs)


def linear() -> nn.Linear:
    return nn.Linear(D, D)


def rows(*size: int) -> Tensor:
    """A random input of `D` samples."""
    return torch.randn(D, *(size or (D,)))


def classes(*size: int, count: int = D) -> Tensor:
    return torch.randint(0, count, (D, *size))


def exact(model: nn.Module, *args: Any, splits: Sequence[Sequence[int]] = SPLITS, **options: Any) -> Program:
    """The model must be exact, node by node, for each split of the batch."""
    return check(model, args, splits=splits, **options)


def exact_body(body: Callable[..., Any], *args: Any, **options: Any) -> Program:
    """A function of a linear layer and the inputs must be exact."""
    return exact(Model(body, linear()), *args, **options)


def in_fours(names: Iterable[str], *, alone: Collection[str] = ()) -> list[tuple[str, ...]]:
    """Names by fours, for tests that capture what several of them do in one program.

    `alone` are those that have a program of their own, as what fixes the batch size would fix it for all.
    """
    rest = [name for name in names if name not in alone]
    return [tuple(rest[first : first + 4]) for first in range(0, len(rest), 4)] + [(name,) for name in alone]


def traffic(local: Program, **sizes: int) -> list[CommRow]:
    """The collectives of a step before bucketing, gradients of parameters aside."""
    assert local.causes is not None
    found = communication(local.causes, {"B": D, **sizes})
    return [row for row in found if "gradient of" not in row.cause]
