"""Turns of loops over the samples with sizes that only the data says: they stay turns of each rank's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from tests.capturing import capture
from tests.lockstep import check


def _matched(x: Tensor, boxes: Tensor) -> Tensor:
    """SSD: anchors that a box matches, the loss of these, classes of all, over how many are matched."""
    losses, classes, count = [], [], 0
    for one, own in zip(x, boxes, strict=True):
        best, matches = (own[:, None] - own.new_ones(6, 4) / 2).sum(-1).sub(one.detach().sum(-1)).max(0)
        matches[best < 0.2] = -1
        places = torch.where(matches >= 0)[0]
        count += matches[places].numel()
        losses.append(F.smooth_l1_loss(one[places, :], own[matches[places]], reduction="sum"))
        target = torch.zeros((one.size(0),), dtype=torch.int64)
        target[places] = matches[places] + 1
        classes.append(target)
    weights = torch.stack(classes)
    return torch.stack(losses).sum() / max(1, count) + (x.sum(-1) * weights).mean()


def _averaged(x: Tensor, boxes: Tensor) -> Tensor:
    """RetinaNet: of each sample its own mean; pairs that lie best, and values that are set by a mask."""
    losses = []
    for one, own in zip(x, boxes, strict=True):
        quality = (own[:, None] * one[None]).detach().sum(-1)
        matches = quality.max(0).indices - 1
        best = torch.where(quality == quality.max(1).values[:, None])[1]
        matches[best] = 1
        found = matches >= 0
        target = torch.zeros_like(one)
        target[found, matches[found]] = 1.0
        places = torch.where(found)[0]
        losses.append(F.mse_loss(one[found], target[found], reduction="sum") / max(1, found.sum()))
        losses[-1] = losses[-1] + (one[places] * own[matches[places]]).sum() / max(1, places.numel())
    return sum(losses[1:], losses[0]) / len(x)


def _read(x: Tensor, boxes: Tensor) -> Tensor:
    """A value that is written before all take their rows, of which there are so many."""
    values = x * 2
    values.add_(0.5)
    made = []
    for one, own in zip(values, boxes, strict=True):
        made.append((one[one.sum(-1) > own.mean()] ** 2).sum(0))
    return torch.stack(made, 1).mean()


LOOPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matched": _matched,
    "a mean of each": _averaged,
    "written before": _read,
}


class Loop(nn.Module):
    def __init__(self, loop: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.loop = loop

    def forward(self, x: Tensor, boxes: Tensor) -> Tensor:
        return self.loop(self.fc(x), boxes)


def _inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 6, 4), torch.rand(8, 2, 4)


@pytest.mark.parametrize("name", LOOPS)
def test_sizes_that_only_the_data_says(name: str) -> None:
    local = check(Loop(LOOPS[name]), _inputs())
    assert local.captured.static
    kinds = [str(node.target) for node in local.gm.graph.nodes]
    assert "fxdp.iterations.default" in kinds
    assert not any("all_gather" in kind for kind in kinds)


@pytest.mark.parametrize(("backend", "loop"), [("eager", _read), ("inductor", _matched)])
def test_a_step(backend: Any, loop: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, inputs = Loop(loop), _inputs()
    compiled = fxdp.compile(model, {"dp": 1}, backend=backend)
    wanted, found = model(*inputs), compiled(*inputs)
    torch.testing.assert_close(found, wanted)
    gradients = torch.autograd.grad(wanted, list(model.parameters()))
    found.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


class Checked(nn.Module):
    """Detectors of torchvision: for each sample one of one size is drawn, and its boxes are checked."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.sizes = [2.0]

    def forward(self, x: Tensor, boxes: Tensor) -> Tensor:
        rows = []
        for one, own in zip(self.fc(x), boxes, strict=True):
            rows.append(one * self.sizes[int(torch.empty(1).uniform_(0.0, float(len(self.sizes))).item())])
            wrong = own[:, 2:] < 0
            if wrong.any():
                place = torch.where(wrong.any(dim=1))[0][0]
                torch._assert(False, f"wrong box {place}")
        return F.dropout(torch.stack(rows), 0.5).mean()


def test_draws_and_checks_of_each_turn_are_one() -> None:
    local = check(Checked(), _inputs(), rng="single-device")
    (asked,) = local.captured.checks
    assert (asked.passes, asked.otherwise) == (False, "raises")
    draws = [node for node in local.captured.gm.graph.nodes if "uniform" in str(node.target)]
    assert len(draws) == 1


def test_a_turn_that_raises() -> None:
    compiled = fxdp.compile(Checked(), {"dp": 1}, backend="eager")
    x, boxes = _inputs()
    compiled(x, boxes)
    boxes[3, 0, 2] = -1
    with pytest.raises(fxdp.InputError, match="refuses this batch"):
        compiled(x, boxes)


def _drawn(x: Tensor, boxes: Tensor) -> Tensor:
    return torch.stack(
        [F.dropout(one[own[0] > 0.5, :], 0.5).sum() for one, own in zip(x.mT, boxes, strict=True)]
    )


def _carried(x: Tensor, boxes: Tensor) -> Tensor:
    last, made = torch.zeros(4), []
    for one, own in zip(x, boxes, strict=True):
        made.append(one[one.sum(-1) > own.mean()].sum(0) + last)
        last.copy_(made[-1])
    return torch.stack(made)


def _written_later(x: Tensor, boxes: Tensor) -> Tensor:
    rows = x * 2
    taken = [rows[i] for i in range(len(rows))]
    rows.add_(rows.detach().sum())
    made = [one[one.sum(-1) > own.mean()].sum(0) for one, own in zip(taken, boxes, strict=True)]
    return torch.stack(made)


def _across(x: Tensor, boxes: Tensor) -> Tensor:
    rows, made = x * 2, []
    for i in range(len(rows)):
        made.append(rows[i][rows[i].sum(-1) > boxes[i].mean()].sum(0))
        rows[i] *= 2
    return torch.stack(made) + rows.sum(1)


@pytest.mark.parametrize("loop", [_drawn, _carried, _across, _written_later])
def test_turns_that_differ_or_know_of_each_other(loop: Callable[..., Tensor]) -> None:
    with pytest.raises(fxdp.CaptureError, match="treats its batch size as a Python constant"):
        capture(Loop(lambda x, boxes: loop(x, boxes).mean()), _inputs(), {})
