"""Checkpoints that move running statistics: in the forward, and again when the backward runs them anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fxdp
from fxdp.errors import CaptureError
from tests.exactness.models import counterpart_of


class Net(nn.Module):
    """What `body` makes of two blocks that share a BatchNorm, and of one without gradients."""

    def __init__(self, body: Callable[[Net, Tensor], Tensor], momentum: float | None = 0.1) -> None:
        super().__init__()
        self.body = body
        norm = nn.BatchNorm1d(6, momentum=momentum)
        self.first = nn.Sequential(nn.Linear(6, 6), norm, nn.GELU())
        self.second = nn.Sequential(nn.Linear(6, 6), norm)
        self.frozen = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False)
        self.head = nn.Linear(6, 3)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self, x)).square().mean()

    def averaged(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.detach().mean(0))
        return self.head.weight.sum() * x

    def assigned(self, x: Tensor) -> Tensor:
        self.average = self.average + x.detach().mean(0)
        return self.head.weight.sum() * x


def _plain(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net.first, x, use_reentrant=False)


def _reentrant(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net.first, net.head.weight.sum() * x, use_reentrant=True)


def _ends_in_norm(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net.second, x, use_reentrant=False)


def _several(net: Net, x: Tensor) -> Tensor:
    """The moves of one norm: those of the forward, then the last checkpoint's, then the first one's."""
    return _ends_in_norm(net, net.first(2 * _plain(net, x)))


def _sequence(net: Net, x: Tensor) -> Tensor:
    return checkpoint_sequential(nn.Sequential(net.first, net.second, nn.ReLU()), 2, x, use_reentrant=False)


def _before_what_is_saved(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda x: net.second(net.frozen(x)), x, use_reentrant=False)


def _after_what_is_saved(net: Net, x: Tensor) -> Tensor:
    """torch ends the second run where it has all that it needs."""
    return checkpoint(lambda x: (net.first[0](x), net.frozen(x))[0], x, use_reentrant=False)


def _without_gradients(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        return _plain(net, x)


def _dropped(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda x: net.first(nn.functional.dropout(x)), x, use_reentrant=False)


BODIES = (
    _plain, _reentrant, _ends_in_norm, _several, _sequence, _before_what_is_saved, _after_what_is_saved,
    _without_gradients, _dropped,
)  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_statistics_move_as_often_as_on_one_device(body: Callable[[Net, Tensor], Tensor]) -> None:
    report = fxdp.verify(Net(body), (torch.randn(8, 6),), splits=[[5, 2, 0, 1]], rng="single-device")
    assert report.ok, report


def test_averages_of_all_batches() -> None:
    report = fxdp.verify(Net(_several, None), (torch.randn(8, 6),), splits=[[5, 3]], mesh={"dp": 2})
    assert report.ok, report


def test_three_steps() -> None:
    model = Net(_several).double()
    twin = counterpart_of(model)
    compiled = fxdp.compile(model, backend="eager")
    for _ in range(3):
        x = torch.randn(7, 6).double()
        compiled(x).backward()
        twin(x).backward()
    for mine, wanted in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


REFUSED: dict[str, tuple[Callable[[Net, Tensor], Tensor], str]] = {
    "nested": (
        lambda net, x: checkpoint(lambda x: 2 * _plain(net, x), x, use_reentrant=False),
        "checkpoint inside of another",
    ),
    "written": (lambda net, x: checkpoint(net.averaged, x, use_reentrant=False), "writes average: one"),
    "assigned": (lambda net, x: checkpoint(net.assigned, x, use_reentrant=False), "writes average: one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_writes_are_refused(name: str) -> None:
    body, words = REFUSED[name]
    with pytest.raises(CaptureError, match=rf"at .*test_checkpoints.py:(.|\n)*{words}"):
        fxdp.plan(Net(body), (torch.randn(8, 6),))
