"""Loops over the samples, whose turns become ops on all of them; those with other turns are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from tests.capturing import capture
from tests.lockstep import check


def _pieces(x: Tensor) -> Tensor:
    """LLaVA-OneVision: of each sample some of its parts, end to end."""
    parts = torch.cat([one[:2] for one in x], dim=0)
    made = []
    for part in parts.split([2] * len(x)):
        first, rest = part[0], part[1:].flatten(0, 1)
        made += [torch.cat([first, rest]), torch.cat([rest, first.relu()])]
    return torch.cat([one.unsqueeze(0) for one in made]).square()


def _padded(x: Tensor) -> Tensor:
    """TimesFM: each series beside zeros, and the least of all."""
    series = [one.flatten() for one in x]
    least = torch.stack([torch.min(one) for one in series]).min()
    return torch.stack([torch.cat([torch.zeros(3), one]) for one in series], dim=1) - least


def _summed(x: Tensor) -> Tensor:
    loss = 0
    for i in range(len(x)):
        target = torch.tensor([1, 2, 0, 3, 1, 0])
        loss = loss + F.cross_entropy(x[i], target)
    return loss / len(x)


def _added(x: Tensor) -> Tensor:
    loss = torch.zeros(())
    for one in x:
        loss += (one @ one.T).logsumexp(-1).mean() + 1
    return loss


def _two(x: Tensor) -> Tensor:
    loss = torch.zeros(())
    for one in x:
        loss += one.tanh().mean()
        loss = loss + 0.1 * one.square().sum() - one.exp().mean()
        loss -= one.relu().sum()
    for one in x:
        loss = loss - one.relu().sum()
    return loss


def _below(x: Tensor) -> Tensor:
    """From nothing, a number or the first sample's own difference."""
    loss, first = 0, x[0].exp().sum() - x[0].mean()
    for one in x:
        loss = loss - one.square().sum()
    for i in range(1, len(x)):
        first = first + (x[i].exp().sum() - x[i].mean())
    return loss + first


def _sum(x: Tensor) -> Tensor:
    return sum(one.exp().sum() for one in x) + x.mean()


def _convolved(x: Tensor) -> Tensor:
    kernel = torch.ones(3, 6, 2)
    return torch.cat([F.conv1d(x[i : i + 1], kernel).softmax(-1) for i in range(x.size(0))], 0)


def _filled(x: Tensor) -> Tensor:
    """Rows written one by one, which are read before; one dim of the value is written later."""
    out, sums = torch.zeros_like(x), x.new_empty(2, len(x))
    for i in range(len(x)):
        out[i] = out[i] + x[i].relu()
        sums[:, i] = x[i].sum()
    out[:, 0] += 1
    return out.square() * sums.sum()


def _listed(x: Tensor) -> Tensor:
    """Z-Image: samples in a list, each with tokens beside its own, padded, and of the first one's dtype."""
    rows = [torch.cat([one, one[-1:].repeat(2, 1)]) for one in x.unbind()]
    mask = torch.cat([torch.tensor([True] + [False] * 7) for _ in rows])
    process_mesh = torch.where(mask[:, None], 0.5, torch.cat(rows).exp()).type_as(x[0])
    padded = nn.utils.rnn.pad_sequence(list(process_mesh.split([8] * len(rows))), batch_first=True)
    return nn.utils.rnn.pad_sequence(list(padded)).transpose(0, 1) * process_mesh.mean()


def _parts(x: Tensor) -> Tensor:
    """Lumina 2: parts of rows, of which some are read between, and rows of rows."""
    out, both = torch.zeros(len(x), 4, 4), x.new_zeros(len(x), 5)
    for i, one in enumerate(x):
        out[i, :2] = one[:2].exp()
        out[i, 2:, 1] = 3
        out[i, 3] = out[i, 0] + one[2]
        out[i, 0, 2:] = 0.5
    for i in range(len(x)):
        both[i, :4] = out[i, 3]
        both[i, 4:] = out[i, 1:3, 1].sum()
    return out.square().mean() * both.cumsum(1)


def _twice(x: Tensor) -> Tensor:
    """Two loops fill one list, whose attention has batch and heads of its own."""
    made = []
    for scale in (1.0, 2.0):
        for i in range(len(x)):
            one = x[i : i + 1].unsqueeze(1) * scale
            mask = torch.ones(1, 6, dtype=torch.bool) if scale > 1 else None
            made.append(F.scaled_dot_product_attention(one, one, one, mask)[0])
    return torch.stack(made, 1)


LOOPS: dict[str, Callable[[Tensor], Tensor]] = {
    "pieces of each": _pieces,
    "each padded": _padded,
    "sums: of losses, in place, Python's": lambda x: _summed(x) + _added(x) + _sum(x) + _two(x) + _below(x),
    "each convolved": _convolved,
    "rows written one by one": _filled,
    "a list for each": _listed,
    "parts of rows": _parts,
    "attention of each, twice": _twice,
}


class Loop(nn.Module):
    def __init__(self, loop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(self.fc(x)).mean()


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_the_samples(name: str) -> None:
    local = check(Loop(LOOPS[name]).double(), (torch.randn(8, 6, 4, dtype=torch.float64),))
    assert local.captured.static
    assert not any("all_gather" in str(node.target) for node in local.gm.graph.nodes)


class Selecting(nn.Module):
    """Mochi and HunyuanVideo 1.5: of each sample the tokens that count, of which there are as many."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        made = []
        for one, counts in zip(self.fc(x), mask, strict=True):
            places = torch.nonzero(counts).flatten()
            made.append(torch.cat([one[places].softmax(0), one[~counts.bool()]]))
        return torch.stack(made).square().mean()


@pytest.mark.parametrize("kept", [2, 6])
def test_as_many_rows_of_each_sample(kept: int) -> None:
    mask = (torch.rand(8, 6).argsort() < kept).long()
    local = check(Selecting().double(), (torch.randn(8, 6, 4, dtype=torch.float64), mask))
    assert local.captured.static
    assert not any("all_gather" in str(node.target) for node in local.gm.graph.nodes)


def test_other_numbers_of_rows_are_refused() -> None:
    mask = torch.ones(8, 6, dtype=torch.long).tril()
    with pytest.raises(fxdp.CaptureError, match="treats its batch size as a Python constant"):
        capture(Selecting().double(), (torch.randn(8, 6, 4, dtype=torch.float64), mask), {})


def _drawn(x: Tensor) -> Tensor:
    return torch.stack([F.dropout(one, 0.5) for one in x])


def _written(x: Tensor) -> Tensor:
    last, made = torch.zeros(6, 4), []
    for one in x:
        made.append(one + last)
        last.copy_(one)
    return torch.stack(made)


def _numbered(x: Tensor) -> Tensor:
    return torch.stack([one * i for i, one in enumerate(x)])


def _written_rows(x: Tensor) -> Tensor:
    out, state = torch.zeros_like(x), torch.zeros_like(x[0])
    for i in range(len(x)):
        state += x[i]
        out[i] = state
    return out


def _read_later(x: Tensor) -> Tensor:
    out, seen = torch.zeros(len(x), 4), []
    for i in range(len(x)):
        row = out[i]
        out[i, :2] = x[i, 0, :2]
        seen.append(row * 2)
        out[i, 2:] = x[i, 0, 2:]
    return torch.stack(seen) + out


def _across(x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 4)
    for i in range(len(x)):
        out[i, 1:] = out[0, :3] + x[i, 0, 1:]
        out[i, 0] = x[i, 0, 0]
    return out


def _chained(x: Tensor) -> Tensor:
    state, made = torch.zeros(6, 4), []
    for one in x:
        state = (state + one).tanh()
        made.append(state)
    return torch.stack(made)


@pytest.mark.parametrize("loop", [_drawn, _written, _numbered, _written_rows, _read_later, _across, _chained])
def test_turns_that_differ_or_know_of_each_other(loop: Callable[[Tensor], Tensor]) -> None:
    """Dropout draws for one sample after another; in the others a turn is more than its sample."""
    with pytest.raises(fxdp.CaptureError, match="treats its batch size as a Python constant"):
        capture(Loop(loop), (torch.randn(8, 6, 4),), {})
