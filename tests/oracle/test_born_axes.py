"""Rows that values select, on virtual ranks: axes born inside a program, whose sizes no input tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxdp import Rows
from fxdp.torch_compat import release_before
from tests.oracle.test_ragged_axes import Parts, gathered, part_of, run_ragged

_SAMPLES = (Rows("samples"), Rows("samples"))
_GRAPHS = (Rows("nodes"), Rows("edges", dim=1, into="nodes"))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 4).double()


def _run(model: nn.Module, batches: Sequence[Parts], rows: Sequence[Rows], **given: Any) -> fx.Graph:
    return run_ragged(model, batches[0], rows, batches[1:], **given)


class _Tokens(_Layer):
    """Losses of tokens that count, positions among these, and a write to chosen rows."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        h, counted = self.layer(x), y != -100
        loss = F.cross_entropy(h[counted], y[counted])
        each = F.cross_entropy(h, y, reduction="none", ignore_index=-100)[counted]
        (at,) = torch.where(y > 0)
        h = h.clone()
        h[counted] = h[counted] * 2 + 1
        h[y == 0] = 3.0
        return loss + each.mean(), h[at], at, (h > 0).nonzero(), torch.masked_select(h, h > 0).square().mean()


class _Repeated(_Layer):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.repeat_interleave(self.layer(x), y.abs() % 5, 0)
        return rows[rows.sum(1) > 0].square().mean(), rows


class _SelfLoops(_Layer):
    """As torch_geometric's GCN and GAT: edges to oneself are dropped, then each node gets one."""

    def forward(self, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        kept = edges[:, edges[0] != edges[1]]
        loops = torch.arange(len(x)).view(1, -1).repeat(2, 1)
        source, target = both = torch.cat([kept, loops], 1)
        h = self.layer(x)
        weight = h.new_zeros(len(h)).index_add(0, target, h.new_ones(len(target))).rsqrt()
        rows = h[source] * (weight[source] * weight[target])[:, None]
        return torch.zeros_like(h).index_add(0, target, rows).relu().sum(), both


class _Joined(_Layer):
    """Rows of two axes, of which more is asked than a rank's own rows tell."""

    def forward(self, x: Tensor, edges: Tensor) -> tuple[Tensor, ...]:
        w = self.layer(x).sum(1)
        both = torch.cat([(w[edges[0]] * w[edges[1]])[edges[0] != edges[1]], w])
        parts = torch.cat([w[edges[0]], w])
        count = edges.shape[1]
        tail = parts[:count].relu().sum() + parts[count:].square().mean()
        return tail, both, both.cumsum(0) + both.softmax(0), both[:1], both.argmax(), both.std()


def _samples(size: int, *, some: bool = True) -> tuple[Tensor, Tensor]:
    y = torch.randint(0, 4, (size,)) if some else torch.full((size,), -100)
    y[::3] = -100
    return torch.randn(size, 5, dtype=torch.float64), y


def _batches(seed: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Batches of four ranks, with ranks that have or select nothing; the last batch selects nothing."""
    torch.manual_seed(seed)
    sizes = [[5, 1, 0, 3], *torch.randint(0, 7, (6, 4)).tolist()]
    mixed = [[_samples(n, some=bool(torch.rand(()) > 0.3)) for n in [*of[:3], of[3] + 1]] for of in sizes]
    return [*mixed, [_samples(n, some=False) for n in (2, 0, 1, 4)]]


@pytest.mark.parametrize("model", [_Tokens, _Repeated])
def test_selected_rows_stay_on_their_rank(model: type[_Layer]) -> None:
    assert gathered(_run(model(), _batches(1), _SAMPLES)) == []


def _graphs() -> list[list[tuple[Tensor, ...]]]:
    torch.manual_seed(1)
    nodes = [(7, 2, 0, 3), (0, 3, 1, 0), (4, 3, 0, 1)]
    edges = [(12, 0, 0, 9), (0, 5, 2, 0), (0, 0, 0, 0)]
    batches = [zip(*of, strict=True) for of in zip(nodes, edges, strict=True)]
    return [[part_of(*sizes, 1)[:2] for sizes in batch] for batch in batches]


def test_self_loops_join_two_axes() -> None:
    for strategy in ("replicate", "shard"):
        assert gathered(_run(_SelfLoops(), _graphs(), _GRAPHS, strategy=strategy)) == []


def test_joined_rows_are_gathered_in_the_order_of_one_device() -> None:
    graph = _run(_Joined(), _graphs(), _GRAPHS)
    assert gathered(graph)
    assert any(str(node.target).count("exchange_sizes") for node in graph.nodes)


class _Experts(nn.Module):
    """Tokens read by the experts that these choose, `top` each, as the code of Mixtral and Switch does.

    `first` is what the mask counts first: the `choices` of all tokens, or `tokens`.
    """

    def __init__(self, first: str, top: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(5, 3).double()
        self.experts = nn.ModuleList(nn.Linear(5, 5).double() for _ in range(3))
        self.first, self.top = first, top

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tokens = torch.stack([x, x.sin()], 1).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(1).topk(self.top)
        mask = F.one_hot(chosen, 3).permute(2, 1, 0)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            if self.first == "choices":
                choice, token = torch.where(mask[number])
            else:
                token, choice = torch.where(chosen == number)
            rows = expert(tokens[None, token].reshape(-1, 5))
            mixed.index_add_(0, token, rows * weights[token, choice, None])
        return mixed.unflatten(0, (-1, 2)).sum(1).square().mean() + y.sum()


@pytest.mark.parametrize(("first", "top"), [("choices", 1), ("choices", 2), ("tokens", 2)])
def test_experts_read_and_write_tokens_of_their_rank(first: str, top: int) -> None:
    assert gathered(_run(_Experts(first, top), _batches(2), _SAMPLES)) == []


class _Runs(_Layer):
    """Rows of several runs, of which more is asked than a rank's own rows tell."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        h = self.layer(x).t()
        mask = (h > 0).unflatten(0, (2, 2))
        pair, _, at = torch.where(mask)
        values = torch.masked_select(h.unflatten(0, (2, 2)), mask)
        order = values.softmax(0)
        full = h.new_zeros(len(values)).index_add(0, torch.arange(len(values)).flip(0), values)
        return order, full, at, pair, (values * y[at] * order).sum()


def test_rows_of_several_runs_are_gathered_in_the_order_of_one_device() -> None:
    graph = _run(_Runs(), _batches(3), _SAMPLES)
    assert gathered(graph)
    assert any(str(node.target).count("exchange_sizes") for node in graph.nodes)


class _ManyRuns(_Layer):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layer(x).t().repeat(5, 1)
        rows = h[h > 0]
        return (rows * rows).sum()


def test_many_runs_are_no_axis() -> None:
    assert gathered(_run(_ManyRuns(), _batches(5), _SAMPLES))


class _Twice(_Layer):
    """One mask, which is computed anew wherever it is read."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layer(x)
        loss = F.cross_entropy(h[y != -100], y[y != -100])
        h = h * 1.0
        h[y != -100] = h[torch.where(y != -100)[0]] * 2 + y[y != -100][:, None]
        return loss, h


@pytest.mark.skipif(release_before(2, 12), reason="this torch's cross_entropy compares sizes that it knows")
def test_rows_of_a_mask_that_is_computed_twice() -> None:
    assert gathered(_run(_Twice(), _batches(4), _SAMPLES)) == []


class _TwoMasks(_Layer):
    """Two masks that select as many rows of the batch, though not of each rank's part."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layer(x)
        return (h[y > 0] * h[y.flip(0) > 0]).mean(), h[y > 0]


def test_the_rows_of_one_mask_are_not_those_of_another() -> None:
    x = torch.randn(8, 5, dtype=torch.float64)
    y = torch.tensor([1, 1, 0, 0, 1, 0, 0, 1])
    assert gathered(run_ragged(_TwoMasks(), [(x[:5], y[:5]), (x[5:], y[5:])], _SAMPLES))
