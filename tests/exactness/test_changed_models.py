"""What the user changes in a model between two calls is seen, as in eager mode."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.ir.tensor_difference import difference
from tests.captures import KNOWN, capture_ahead, captured_once
from tests.exactness.models import counterpart_of, gradient_errors, part
from tests.rank_pool import RankPool


class _Net(nn.Module):
    smooth = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0)
        self.head = nn.Linear(8, 4)
        self.beta = 1.0
        self.activation: Callable[[Tensor], Tensor] = torch.relu

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.drop(self.activation(self.norm(self.first(x))))
        return self.beta * F.cross_entropy(self.head(hidden), y, label_smoothing=self.smooth)


def _head(net: _Net) -> None:
    net.head = nn.Linear(8, 4)


def _weight(net: _Net) -> None:
    net.head.weight = nn.Parameter(2 * net.head.weight.detach())


def _load(net: _Net) -> None:
    net.load_state_dict({name: 2 * t for name, t in net.state_dict().items()}, assign=True)


def _hook(net: _Net) -> None:
    net.first.register_forward_hook(lambda _, __, output: output.tanh())


def _beta(net: _Net) -> None:
    net.beta = 0.25


def _smooth(net: _Net) -> None:
    net.smooth = 0.5  # was the class's


def _momentum(net: _Net) -> None:
    net.norm.momentum = 0.7


def _dropout(net: _Net) -> None:
    net.drop.p = 1.0


def _activation(net: _Net) -> None:
    net.activation = torch.sin


CHANGES: dict[str, Callable[[_Net], None]] = {
    f.__name__[1:]: f
    for f in (_head, _weight, _load, _hook, _beta, _smooth, _momentum, _dropout, _activation)
}


def _changed(name: str, split: list[int]) -> list[float]:
    torch.set_default_dtype(torch.float64)
    net = _Net()
    twin = counterpart_of(net)
    compiled = fxdp.compile(net, backend="eager")
    x, y = torch.randn(sum(split), 6), torch.randint(0, 4, (sum(split),))
    rank, errors = dist.get_rank(), []
    for step in range(3):
        if step == 1:
            torch.manual_seed(7 + rank)  # a new layer is the first rank's
            CHANGES[name](net)
            torch.manual_seed(7)
            CHANGES[name](twin)
        net.zero_grad()
        twin.zero_grad()
        with captured_once(KNOWN.setdefault(__name__, {})) if step == 0 else contextlib.nullcontext():
            loss = compiled(part(x, split, rank), part(y, split, rank))
        expected = twin(x, y)
        loss.backward()
        expected.backward()
        errors += [difference(loss.detach(), expected.detach()), *gradient_errors(net, twin)]
        pairs = zip(net.buffers(), twin.buffers(), strict=True)
        errors += [difference(a, b) for a, b in pairs]
    return errors


def _know() -> None:
    torch.set_default_dtype(torch.float64)
    inputs = torch.randn(5, 6), torch.randint(0, 4, (5,))
    capture_ahead(__name__, _Net(), inputs, {}, {"dp": 2})


@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_calls(ranks: RankPool, name: str) -> None:
    ranks.prepare(_know)
    for errors in ranks.run(2, _changed, name, [4, 1]):
        assert max(errors) <= 1e-9


def test_values_that_return_have_their_program_still(caplog: pytest.LogCaptureFixture) -> None:
    net = _Net()
    compiled = fxdp.compile(net, backend="eager")
    x, y = torch.randn(5, 6), torch.randint(0, 4, (5,))
    losses = []
    with caplog.at_level(logging.WARNING, "fxdp"):
        for beta, smooth in ((1.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.0, 0.1), (0.5, 0.1), (0.5, 0.0)):
            net.beta, net.smooth = beta, smooth
            losses.append(compiled(x, y).item())
    assert losses[1] == pytest.approx(losses[0] / 2)
    assert losses[2] == pytest.approx(losses[0])
    assert losses[4:] == pytest.approx([losses[3] / 2, losses[1]])
    assert compiled._programs.compiled == 3, "beta is an input from its second value, the smoothing never"
    (record,) = (record for record in caplog.records if record.name == "fxdp")
    assert record.getMessage().startswith("smooth of the model (0.1) has another value than before")
