"""Whatever the partitioner recomputes, the backward uses the numbers of the forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxdp

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")


class Dropped(nn.Module):
    """Dropout as it is and inside of a checkpoint; returns what shows the masks."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(40))
        self.v = nn.Parameter(torch.ones(40))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = F.dropout(x * self.w, 0.5)
        again = checkpoint(lambda y: F.dropout(y * self.v, 0.5).sin(), first.cos(), use_reentrant=False)
        return first.sum() + again.sum(), first, again


def gradients(first: Tensor, again: Tensor) -> tuple[Tensor, Tensor]:
    """What the gradients are if the backward used the masks of the forward."""
    one, two, inner = (first != 0) * 2.0, (again != 0) * 2.0, first.cos()
    slope = (two * inner).cos() * two
    return (one * (1 - slope * first.sin())).sum(0), (slope * inner).sum(0)


@pytest.mark.parametrize("rng", ["sharded", "single-device"])
def test_the_backward_repeats_the_masks(rng: str) -> None:
    model, x = Dropped().double(), torch.ones(6, 40, dtype=torch.float64)
    with torch._functorch.config.patch(activation_memory_budget=0.0):  # everything is recomputed
        compiled = fxdp.compile(model, rng=rng)
        torch.manual_seed(3)
        loss, first, again = compiled(x)
        loss.backward()
    for parameter, expected in zip(model.parameters(), gradients(first, again), strict=True):
        torch.testing.assert_close(parameter.grad, expected.detach(), rtol=1e-12, atol=1e-12)
    if rng == "single-device":
        torch.manual_seed(3)
        for value, expected in zip((first, again), model(x)[1:], strict=True):
            assert torch.equal(value, expected), "eager's own numbers"


class Unread(nn.Module):
    """Draws last what it throws away."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(x)
        F.dropout(y.sin())
        return y


def test_a_draw_that_nobody_reads_is_made() -> None:
    model, x = Unread(), torch.ones(6, 40, requires_grad=True)
    compiled = fxdp.compile(model, rng="single-device")
    found = []
    for step in (compiled, model):
        torch.manual_seed(3)
        found.append([step(x) for _ in range(2)])
    assert all(map(torch.equal, *found))
    found[0][1].sum().backward()
    assert torch.equal(x.grad, found[0][1].detach()), "the masks of the forward"
