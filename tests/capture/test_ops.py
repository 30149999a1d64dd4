"""Single ops and Python habits that are easy to get wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .oracle import check


class Uses(nn.Module):
    """A linear layer `fc`, and what `function` does with it."""

    def __init__(self, function: Callable[..., torch.Tensor], other: nn.Module | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.other = other
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def _branch(s: Uses, x: torch.Tensor) -> torch.Tensor:
    y = s.fc(x)
    return torch.cond(y.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (y,)).sum()


def _cached(s: Uses, x: torch.Tensor) -> torch.Tensor:
    s.cache = s.fc(x)
    return s.cache.sum()


def _similar(s: Uses, x: torch.Tensor) -> torch.Tensor:
    return ((s.fc(x) @ s.fc(x).T) * (1 - torch.eye(x.shape[0]))).logsumexp(1).mean()


def _mask(s: Uses, x: torch.Tensor) -> torch.Tensor:
    return s.fc(x)[x[:, 0] > 0].mean()


def _solve(s: Uses, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve(s.fc(x).T @ s.fc(x) + torch.eye(6), x.T).mean()


def _noise(s: Uses, x: torch.Tensor) -> torch.Tensor:
    return (s.fc(x) + torch.randn_like(x)).pow(2).mean() + torch.rand(x.shape[0]).sum()


def _decay(s: Uses, x: torch.Tensor) -> torch.Tensor:
    return s.fc(x).mean() + 0.1 * sum(p.pow(2).sum() for p in s.parameters())


def _layer(s: Uses, x: torch.Tensor) -> torch.Tensor:
    assert s.other is not None
    return s.other(s.fc(x)[:, None, :].expand(-1, 3, -1)).pow(2).mean()


CASES: dict[str, Callable[[], Uses]] = {  # made in the test, after its seed
    "checkpoint": lambda: Uses(lambda s, x: checkpoint(s.fc, x, use_reentrant=False).tanh().sum()),
    "cond": lambda: Uses(_branch),
    "attribute": lambda: Uses(_cached),
    "mask": lambda: Uses(_mask),
    "nonzero": lambda: Uses(lambda s, x: s.fc(x).sum() * (x[:, 0] > 0).nonzero().shape[0]),
    "transformer": lambda: Uses(_layer, nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)),
    "weight_norm": lambda: Uses(_layer, nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))),
    "spectral_norm": lambda: Uses(_layer, nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))),
    "similarity": lambda: Uses(_similar),
    "solve": lambda: Uses(_solve),
    "noise": lambda: Uses(_noise),
    "decay": lambda: Uses(_decay),
    "repeat": lambda: Uses(lambda s, x: s.fc(x).repeat_interleave(3, 0).view(-1, 3, 6).std()),
    "differences": lambda: Uses(lambda s, x: (s.fc(x)[1:] - x[:-1]).pow(2).mean()),
    "concatenated": lambda: Uses(lambda s, x: torch.cat([s.fc(x), x]).chunk(2)[0].pow(2).sum()),
    "root": lambda: Uses(lambda s, x: s.fc(x).sum() / x.size(0) ** 0.5),
    "logarithm": lambda: Uses(lambda s, x: s.fc(x).logsumexp(0).mean() - math.log(len(x))),
    "count": lambda: Uses(lambda s, x: s.fc(x).sum() / x.numel() * x.size(0)),
    "one_hot": lambda: Uses(lambda s, x: (F.one_hot(x[:, 0].long().abs().clamp(0, 5), 6) * s.fc(x)).mean()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str) -> None:
    check(CASES[name]().double(), (torch.randn(5, 6),), {}, ((torch.randn(6, 6),), {}))
