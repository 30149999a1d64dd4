"""Compiled modules called with ragged batches: as a program, or op by op with `fallback="eager"`."""

from __future__ import annotations

import re
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
        kept = edge_index[:, edge_index[0] != edge_index[1]]
        source, target = torch.cat([kept, torch.arange(len(x)).view(1, -1).repeat(2, 1)], 1)
        h = self.linear(x + torch.zeros_like(x).index_add(0, target, x[source]))
        return h, F.cross_entropy(h, y) + h[y > 0].square().mean()


def _parts() -> list[tuple[Tensor, ...]]:
    x, y = torch.arange(15.0, dtype=torch.float64).reshape(5, 3).sin(), torch.tensor([0, 1, 1, 0, 1])
    edges, none = torch.tensor([[0, 1, 2, 2, 2, 0], [1, 2, 0, 1, 2, 0]]), torch.zeros(2, 0, dtype=torch.int64)
    return [(x[:3], edges, y[:3]), (x[3:], none, y[3:]), (x[:0], none, y[:0])]


def _called(parts: list[tuple[Tensor, ...]], **options: Any) -> dict[str, Any]:
    model = _Graph().double()
    if dist.get_rank():  # the ranks start with rank 0's values
        nn.init.zeros_(model.linear.weight)
    compiled = fxdp.compile(model, batch_dims=DIMS, **options)
    out, loss = compiled(*parts[dist.get_rank()])
    loss.backward()
    return {"out": out.detach(), "loss": loss.item(), "grad": compiled.linear.weight.grad}


def _compiled() -> list[dict[str, Any]]:
    model, found = _Graph().double(), []
    compiled = fxdp.compile(model, batch_dims=DIMS, backend="eager")
    for parts in (_parts(), _parts()[::-1]):  # the second set of sizes is compiled for any
        compiled.zero_grad()
        out, loss = compiled(*parts[dist.get_rank()])
        loss.backward()
        found.append({"out": out.detach(), "loss": loss.item(), "grad": model.linear.weight.grad.clone()})
    assert "all_gather" not in str(compiled.graph.graph)
    plan = compiled.plan
    assert [(row.axis, row.sizes) for row in plan.axes] == [("nodes", (0, 2, 3)), ("edges", (0, 0, 6))]
    assert "  edges: 3.00 of the mean (0 0 6 on the ranks, " in str(plan)
    assert re.search(r"by an estimate it has \d\.\d+ of the mean work: the others wait \d+ %", str(plan))
    assert fxdp.Plan.from_json(plan.to_json()).axes == plan.axes
    _refused(compiled, re.escape(
        "rank 0: a ragged batch does not fit together, so nothing of it was computed:\n"
        "  edge_index: 1 values outside of 'nodes', as 3 at [0, 1]; expected 0 to 2: each rank counts "
        "its own 3 rows, and cannot point to those of another rank\n"
        "rank 2: a ragged batch does not fit together, so nothing of it was computed:\n"
        "  the axis 'nodes' has 3 rows in x and 2 rows in y; expected one number"
    ))  # fmt: skip
    for options in ({"communication": {"uneven": False}}, {"pipeline": {"microbatches": 2}}):
        _refused(fxdp.compile(model, batch_dims=DIMS, backend="eager", **options), "(?s)rank 0: .*rank 2: ")
    loss = compiled(*_parts()[dist.get_rank()])[1]
    assert loss.item() == pytest.approx(found[0]["loss"], rel=1e-12)
    return found


def _refused(compiled: fxdp.CompiledModule, message: str) -> None:
    """Call with an edge of rank 0 to a node of rank 1, and with too few classes of nodes on rank 2."""
    x, edges, y = _parts()[0]
    edges = edges[:, :2] + torch.tensor([[0, 2 * (dist.get_rank() == 0)], [0, 0]])
    with pytest.raises(fxdp.InputError, match=message):
        compiled(x, edges, y[: 3 - (dist.get_rank() == 2)])


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


def _expected(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, float, Tensor]:
    """The outputs, the loss and the gradient of one device; the edges of one rank are all that there are."""
    model, before = _Graph().double(), 0
    edges = []
    for part in parts:
        edges.append(part[1] + before)
        before += len(part[0])
    out, loss = model(torch.cat([p[0] for p in parts]), torch.cat(edges, 1), torch.cat([p[2] for p in parts]))
    loss.backward()
    return out.detach(), loss.item(), model.linear.weight.grad


def _compare(parts: list[tuple[Tensor, ...]], found: list[dict[str, Any]]) -> None:
    out, loss, grad = _expected(parts)
    for rows, got in zip(out.split([len(part[0]) for part in parts]), found, strict=True):
        torch.testing.assert_close(got["out"], rows, rtol=0, atol=1e-12)
        assert got["loss"] == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(got["grad"], grad, rtol=0, atol=1e-12)


def test_positions_of_documents_that_begin_in_the_middle_are_refused() -> None:
    compiled = fxdp.compile(_Packed(), batch_dims=(_PACKED, {}))
    batch = list(_documents([3, 2], [1, 2]))
    batch[1] = torch.tensor([[2, 3, 4, 0, 2]])
    with pytest.raises(fxdp.InputError, match=r"(?s)the first row is 2 .*positions: 2 after 0 at 4"):
        compiled(*batch)


def test_a_ragged_call_runs_op_by_op(ranks: RankPool) -> None:
    _compare(_parts(), ranks.run(3, _called, _parts(), fallback="eager"))


def test_a_ragged_call_is_compiled(ranks: RankPool) -> None:
    found = ranks.run(3, _compiled)
    for call, parts in enumerate((_parts(), _parts()[::-1])):
        _compare(parts, [rank[call] for rank in found])


class _Cut(nn.Module):
    """Reads as many of one axis' rows as another one has."""

    def forward(self, x: Tensor, bags: Tensor) -> Tensor:
        return x[: len(bags)] + bags


def test_a_ragged_call_that_capture_refuses_is_told_by_line() -> None:
    compiled = fxdp.compile(_Cut(), batch_dims=((Rows("words"), Rows("bags")), {}))
    with pytest.raises(fxdp.CaptureError, match=r"test_ragged_calls.py:\d+ `return x\[: len\(bags\)\]"):
        compiled(torch.ones(5), torch.ones(3))


class _Fewer(nn.Module):
    """Of as many rows as bags the mean; these are all rows, if there are more bags."""

    def forward(self, x: Tensor, bags: Tensor) -> Tensor:
        return x[: len(bags)].mean() + bags.sum()


def test_which_axis_is_longer_is_asked_at_each_call() -> None:
    compiled = fxdp.compile(_Fewer(), batch_dims=((Rows("words"), Rows("bags")), {}), backend="eager")
    for words, bags in ((12, 6), (5, 11), (12, 3), (3, 13)):
        batch = torch.arange(1.0 * words), torch.ones(bags)
        torch.testing.assert_close(compiled(*batch), _Fewer()(*batch))


class _Packed(nn.Module):
    """Attention within packed documents, with a bag of words for each document, and the mean of all rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.project = nn.EmbeddingBag(9, 8, mode="sum"), nn.Linear(8, 24)

    def forward(
        self, x: Tensor, positions: Tensor, bounds: Tensor, words: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        documents = torch.repeat_interleave(bounds.diff(), output_size=x.shape[1])
        h = x + self.table(words, offsets)[documents]
        query, key, value = self.project(h).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mask = documents[:, None] == documents
        mask = (mask & (positions <= positions.t()))[None, None]
        out = F.scaled_dot_product_attention(query, key, value, mask).pow(2).mean((1, 3))
        return out, out.mean()


_PACKED = (
    Rows("tokens", dim=1), Rows("tokens", dim=1, within="documents"), Rows("documents", bounds="tokens"),
    Rows("words"), Rows("documents", starts="words"),
)  # fmt: skip


def _documents(lengths: list[int], bags: list[int]) -> tuple[Tensor, ...]:
    """Return documents of these lengths, each with a bag of so many words."""
    positions = torch.cat([torch.arange(0), *map(torch.arange, lengths)])
    bounds, starts = (F.pad(torch.tensor(n, dtype=torch.int64).cumsum(0), (1, 0)) for n in (lengths, bags))
    x = torch.arange(8.0 * sum(lengths)).view(1, -1, 8).sin().double()
    return x, positions[None], bounds, torch.arange(sum(bags)) % 9, starts[:-1]


_PARTS = ([3, 1], [2, 0]), ([], [])


def _packed_called() -> tuple[Tensor, list[Tensor]]:
    model = _Packed().double()
    compiled = fxdp.compile(model, batch_dims=(_PACKED, {}))
    out, loss = compiled(*_documents(*_PARTS[dist.get_rank()]))
    loss.backward()
    return out.detach(), [parameter.grad for parameter in model.parameters()]


def test_packed_documents_and_bags_run_through_inductor(ranks: RankPool) -> None:
    model = _Packed().double()
    out, loss = model(*_documents(*_PARTS[0]))  # the second rank has none
    loss.backward()
    wanted = out.detach(), out.detach()[:, :0]
    for (rows, grads), expected in zip(ranks.run(2, _packed_called), wanted, strict=True):
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-12)
        for grad, parameter in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-12)


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
    with pytest.raises(fxdp.InputError, match=r"one is a PackedSequence: .*fallback='eager'"):
        fxdp.compile(model)(packed)


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
