"""Compiled modules called with ragged batches: op by op with `fallback="eager"`, else refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import fxdp
from fxdp import Rows
from tests.eager.ragged.test_by_hand import graphs
from tests.eager.ragged.test_recognised import GraphBatch, with_ptr
from tests.rank_pool import RankPool

DIMS = ((Rows("nodes"), Rows("edges", dim=1, into="nodes"), Rows("nodes")), {})


class _Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, edge_index: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        source, target = edge_index[0], edge_index[1]
        h = self.linear(x + torch.zeros_like(x).index_add(0, target, x[source]))
        return h, F.cross_entropy(h, y)


def _parts() -> list[tuple[Tensor, ...]]:
    x, y = torch.arange(15.0, dtype=torch.float64).reshape(5, 3).sin(), torch.tensor([0, 1, 1, 0, 1])
    none = torch.zeros(2, 0, dtype=torch.int64)
    return [
        (x[:3], torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]]), y[:3]), (x[3:], none, y[3:]), (x[:0], none, y[:0])
    ]  # fmt: skip


def _called() -> dict[str, Any]:
    model = _Graph().double()
    if dist.get_rank():  # the ranks start with rank 0's values
        nn.init.zeros_(model.linear.weight)
    compiled = fxdp.compile(model, batch_dims=DIMS, fallback="eager")
    out, loss = compiled(*_parts()[dist.get_rank()])
    loss.backward()
    return {"out": out.detach(), "loss": loss.item(), "grad": compiled.linear.weight.grad}


def _called_with_global_tensors() -> dict[str, Any]:
    model = _Graph().double()
    parts, (described, _) = _parts()[dist.get_rank()], DIMS
    found: dict[str, Any] = {}
    for name, dims in {"told": DIMS, "untold": None}.items():
        compiled = fxdp.compile(model, batch_dims=dims, fallback="eager")
        out, loss = compiled(*fxdp.global_batch(parts, batch_dims=described))
        found[name] = {"out": out.detach().full(), "loss": loss.item()}
    return found


def test_a_call_with_ragged_global_tensors_gives_global_ones(ranks: RankPool) -> None:
    parts = _parts()
    full = torch.cat([p[0] for p in parts[:2]]), parts[0][1], torch.cat([p[2] for p in parts[:2]])
    out, loss = _Graph().double()(*full)
    for got in ranks.run(2, _called_with_global_tensors):
        for one in got.values():
            torch.testing.assert_close(one["out"], out.detach())
            assert one["loss"] == pytest.approx(loss.item(), rel=1e-12)


def test_a_ragged_call_runs_op_by_op(ranks: RankPool) -> None:
    model, parts = _Graph().double(), _parts()
    out, loss = model(torch.cat([p[0] for p in parts]), parts[0][1], torch.cat([p[2] for p in parts]))
    loss.backward()
    for rows, got in zip(out.detach().split([3, 2, 0]), ranks.run(3, _called), strict=True):
        torch.testing.assert_close(got["out"], rows)
        assert got["loss"] == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(got["grad"], model.linear.weight.grad)


def test_without_fallback_it_is_refused() -> None:
    compiled = fxdp.compile(_Graph().double(), batch_dims=DIMS)
    with pytest.raises(fxdp.InputError, match=r"fxdp\.Rows.*fallback='eager'"):
        compiled(*_parts()[0])
    with pytest.raises(fxdp.InputError, match=r"Rows\('nodes'.*fallback='eager'"):
        fxdp.plan(_Graph().double(), _parts()[0], batch_dims=DIMS)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.GRU(3, 2)

    def forward(self, batch: PackedSequence) -> Tensor:
        return self.rnn(batch)[1][0]


def test_packed_sequences_need_no_description() -> None:
    packed = pack_sequence([torch.ones(2, 3), torch.zeros(4, 3)], enforce_sorted=False)
    model = _Recurrent()
    compiled = fxdp.compile(model, fallback="eager")
    torch.testing.assert_close(compiled(packed), model(packed))


class _OfGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2).double()

    def forward(self, batch: GraphBatch) -> Tensor:
        h = self.linear(batch["x"])
        return h.new_zeros(batch.num_graphs, 2).index_add(0, batch["batch"], h)


def test_graphs_enter_once() -> None:
    batch, model = GraphBatch(with_ptr(graphs(0, [3, 0, 2]))), _OfGraphs()
    compiled, expected = fxdp.compile(model, fallback="eager"), model(batch)
    torch.testing.assert_close(compiled(batch), expected)
    found = compiled(fxdp.global_batch(batch))
    assert isinstance(found, fxdp.GlobalTensor)
    torch.testing.assert_close(found.full(), expected)
    again = fxdp.global_batch(fxdp.global_batch(batch))
    assert (again.num_graphs, again["ptr"].tolist()) == (3, [0, 3, 3, 5])
