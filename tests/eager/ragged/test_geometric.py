"""torch_geometric, where it is installed: its convolutions on batches of graphs, typed graphs, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.eager.loader import _entered
from tests.eager.ragged.comparing import error_of, refusal_of, trained
from tests.eager.virtual import on_virtual_ranks

pytest.importorskip("torch_geometric")
from torch_geometric import nn as gnn
from torch_geometric.data import Batch, Data, HeteroData, TemporalData

DOUBLE = torch.float64
SIZES = [(3, 4), (2, 0)], [(0, 0)], [(1, 0), (4, 3), (2, 2)]
"""Nodes and edges of each graph on each rank."""


def graph(nodes: int, edges: int, seed: int) -> Any:
    made = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.randn(nodes, 3, dtype=DOUBLE, generator=made),
        edge_index=torch.randint(0, max(nodes, 1), (2, edges), generator=made),
        y=torch.randn(1, dtype=DOUBLE, generator=made),
        name=f"graph {seed}",
    )


def joined(every: Any) -> Any:
    """The batch of one device."""
    return Batch.from_data_list([one for part in every for one in part])


def batches(sizes: Any) -> tuple[Any, list[Any]]:
    every = [[graph(n, e, 10 * i + j) for j, (n, e) in enumerate(one)] for i, one in enumerate(sizes)]
    return joined(every), [Batch.from_data_list(one) for one in every]


def mlp(inner: int, outer: int) -> nn.Module:
    return gnn.GINConv(nn.Sequential(nn.Linear(inner, outer), nn.ReLU(), nn.Linear(outer, outer)))


LAYERS: dict[str, Any] = {
    "gcn": gnn.GCNConv, "gat": gnn.GATConv, "sage": gnn.SAGEConv, "gin": mlp,
    "transformer": gnn.TransformerConv,
}  # fmt: skip


class Net(nn.Module):
    """Two convolutions and a mean per graph."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.first, self.second, self.norm = layer(3, 4), layer(4, 4), gnn.BatchNorm(4)
        self.head = nn.Linear(4, 1)

    def forward(self, data: Any) -> Tensor:
        h = F.relu(self.norm(self.first(data.x, data.edge_index)))
        h = self.second(h, data.edge_index)
        return self.head(gnn.global_mean_pool(h, data.batch, data.num_graphs)).squeeze(1)


@pytest.mark.parametrize("name", LAYERS)
def test_batches_of_graphs(name: str) -> None:
    def run(data: Any) -> dict[str, Any]:
        model = Net(LAYERS[name])
        out = model(data)
        assert len(data.name) == data.num_graphs
        return trained(model, F.mse_loss(out, data.y), out=out, ptr=data.ptr)

    error_of(run, *batches(SIZES))


class Loss(nn.Module):
    """Edges of several types, and a target of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.typed = Net(gnn.GCNConv), gnn.RGCNConv(3, 1, num_relations=2)

    def forward(self, data: Any) -> Tensor:
        h = self.typed(data.x, data.edge_index, (data.edge_index[0] > data.edge_index[1]).long())
        return F.mse_loss(self.net(data), data.y) + h.square().mean()


class Likes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = gnn.SAGEConv((3, 2), 4)

    def forward(self, data: Any) -> Tensor:
        x, edges = data.x_dict, data.edge_index_dict["user", "likes", "item"]
        out: Tensor = self.layer((x["user"], x["item"]), edges)
        pooled = gnn.global_add_pool(out, data["item"].batch, data.num_graphs).sin().mean(1)
        return F.mse_loss(pooled, data.y)


def test_batches_are_compiled_as_they_are() -> None:
    assert fxdp.verify(Loss(), (batches(SIZES)[0],), mesh={"dp": 3}, splits=[[2, 1, 3]]).ok
    assert fxdp.verify(Likes(), (joined(TYPED),), mesh={"dp": 3}, splits=[[2, 1, 1]]).ok


def typed(users: int, items: int, edges: int, seed: int) -> Any:
    made, data = torch.Generator().manual_seed(seed), HeteroData()
    data["user"].x = torch.randn(users, 3, dtype=DOUBLE, generator=made)
    data["item"].x = torch.randn(items, 2, dtype=DOUBLE, generator=made)
    ends = [torch.randint(0, n, (edges,), generator=made) for n in (users, items)]
    data["user", "likes", "item"].edge_index = torch.stack(ends)
    data.y = torch.randn(1, dtype=DOUBLE, generator=made)
    return data


TYPED = [[typed(2, 3, 4, 0), typed(1, 1, 1, 1)], [typed(3, 1, 0, 2)], [typed(1, 5, 3, 3)]]


def test_typed_graphs() -> None:
    every = TYPED

    def run(data: Any) -> dict[str, Any]:
        model = gnn.SAGEConv((3, 2), 4)
        x, edges = data.x_dict, data.edge_index_dict["user", "likes", "item"]
        out = model((x["user"], x["item"]), edges)
        pooled = gnn.global_add_pool(out.sum(1), data["item"].batch, data.num_graphs)
        return trained(model, F.mse_loss(pooled, data.y), out=out, batch=data["item"].batch)

    error_of(run, joined(every), [Batch.from_data_list(one) for one in every])


def test_bad_graphs() -> None:
    _, parts = batches([[(3, 4)], [(2, 2)]])
    parts[0].edge_index[1, 2] = 3
    assert "rank 0, .edge_index: 1 values outside of 'nodes', as 3 at [1, 2]" in refusal_of(parts)
    sampled = Data(x=torch.ones(3, 1), edge_index=torch.zeros(2, 1, dtype=torch.int64), batch_size=2)
    assert "the first 2 nodes of this rank are seeds" in refusal_of([sampled, sampled])
    matrix = Data(x=torch.ones(3, 1), adj_t=torch.eye(3).to_sparse())
    assert "adj_t is a sparse matrix of this rank's nodes; expected edge_index" in refusal_of(
        [matrix, matrix]
    )


def test_graphs_stay_in_a_global_batch() -> None:
    _, parts = batches([[(3, 4)], [(2, 2)]])

    def on_rank(ranks: Any) -> None:
        with pytest.raises(fxdp.InputError, match=r"expected unbatch\(x, batch\)"):
            _entered(parts[ranks.rank], ranks, None).to_data_list()

    on_virtual_ranks(2, on_rank)


def test_events_of_one_graph() -> None:
    """Nodes of a `TemporalData` are numbers in a table that all ranks have, not rows of a rank."""
    from_to = torch.tensor([[0, 3, 1, 2, 3], [2, 2, 4, 0, 1]])

    def events(first: int, last: int) -> Any:
        source, target = from_to[:, first:last]
        return TemporalData(src=source, dst=target, t=torch.arange(first, last), msg=target.double()[:, None])

    def run(data: Any) -> dict[str, Any]:
        table = nn.Embedding(5, 1)
        out = table(data.src) - table(data.dst) * data.msg
        return trained(table, out.square().mean(), out=out, events=data.num_events)

    error_of(run, events(0, 5), [events(0, 3), events(3, 3), events(3, 5)])
