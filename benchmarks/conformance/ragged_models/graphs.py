"""Networks of torch_geometric on batches of its own loader: loss by node, and by graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from benchmarks.conformance.ragged_models.case import BARE, Case
from fxdp import Rows

WIDTH = 4
EMPTY = 3
"""A graph without nodes; all graphs of `BARE` have no edges."""
SPLITS = {2: (5, 1), 4: (3, 1, 1, 1)}
"""Graphs of each rank: a loader makes no batch without any. The second rank of four has no node."""
RELATIONS = 3


class Hypergraph(Data):
    """A graph whose edges connect any number of nodes."""

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Return how far values count on: nodes and hyperedges."""
        if key == "hyperedge_index":
            return torch.tensor([[self.num_nodes], [len(self.hyperedge_attr)]])
        return super().__inc__(key, value, *args, **kwargs)


class Network(nn.Module):
    """Two convolutions, a class of each node and a number of each graph."""

    def __init__(self, layer: Any, norm: Any = gnn.BatchNorm) -> None:
        super().__init__()
        self.first, self.second = layer(WIDTH, WIDTH), layer(WIDTH, WIDTH)
        self.norm, self.node, self.graph = norm(WIDTH), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1)

    def forward(
        self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor, target: Tensor, **more: Tensor
    ) -> Tensor:
        """Return the loss of nodes and of graphs."""
        h = self.norm(self.first(x, edge_index, **more)).relu()
        h = self.second(h, edge_index, **more)
        pooled = gnn.global_mean_pool(h, batch, len(target)) + gnn.global_add_pool(h, batch, len(target))
        graphs = F.mse_loss(self.graph(pooled).squeeze(1), target)
        return F.cross_entropy(self.node(h), y) + graphs


class Transformed(nn.Module):
    """GPS: a local convolution and attention between all nodes of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = gnn.GPSConv(WIDTH, gnn.SAGEConv(WIDTH, WIDTH), heads=2)
        self.node, self.graph = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor, target: Tensor) -> Tensor:
        """Return the loss of nodes and of graphs."""
        h = self.layer(x, edge_index, batch)
        pooled = gnn.global_mean_pool(h, batch, len(target))
        return F.cross_entropy(self.node(h), y) + F.mse_loss(self.graph(pooled).squeeze(1), target)


class Hyper(nn.Module):
    """Hypergraph convolutions, over the incidence of nodes and hyperedges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = gnn.HypergraphConv(WIDTH, WIDTH), gnn.HypergraphConv(WIDTH, 3)

    def forward(
        self, x: Tensor, node: Tensor, hyperedge: Tensor, hyperedge_attr: Tensor, y: Tensor
    ) -> Tensor:
        """Return the loss of nodes."""
        pairs, edges = torch.stack([node, hyperedge]), len(hyperedge_attr)
        h = self.first(x, pairs, num_edges=edges).relu()
        return F.cross_entropy(self.second(h, pairs, num_edges=edges), y)


def _graph(i: int, made: Generator, *, typed: bool = False) -> Data:
    nodes = 0 if i == EMPTY else 1 + (i * 5) % 4
    edges = 0 if i in BARE else 2 + i
    more = {"edge_type": torch.randint(0, RELATIONS, (edges,), generator=made)} if typed else {}
    return Data(
        x=torch.randn(nodes, WIDTH, dtype=torch.float64, generator=made),
        edge_index=torch.randint(0, max(nodes, 1), (2, edges), generator=made),
        y=torch.randint(0, 3, (nodes,), generator=made),
        target=torch.randn(1, dtype=torch.float64, generator=made),
        **more,
    )


def _hypergraph(i: int, made: Generator) -> Data:
    nodes, hyperedges = 0 if i == EMPTY else 2 + i % 3, 0 if i in BARE else 1 + i % 2
    incidence = 3 * hyperedges
    ends = [torch.randint(0, max(n, 1), (incidence,), generator=made) for n in (nodes, hyperedges)]
    return Hypergraph(
        x=torch.randn(nodes, WIDTH, dtype=torch.float64, generator=made),
        hyperedge_index=torch.stack(ends),
        hyperedge_attr=torch.ones(hyperedges, 1, dtype=torch.float64),
        y=torch.randint(0, 3, (nodes,), generator=made),
    )


def _loaded(samples: Sequence[Data]) -> Any:
    """The batch of torch_geometric's own loader."""
    return next(iter(DataLoader(list(samples), batch_size=len(samples))))


def _fields(batch: Any, *, keys: Sequence[str]) -> dict[str, Tensor]:
    return {key: batch[key] for key in keys}


def _pairs(batch: Any) -> dict[str, Tensor]:
    node, hyperedge = batch["hyperedge_index"]
    return {"node": node, "hyperedge": hyperedge, **_fields(batch, keys=("x", "hyperedge_attr", "y"))}


_ROWS = {
    "x": Rows("nodes"), "edge_index": Rows("edges", dim=1, into="nodes"),
    "batch": Rows("nodes", into="graphs"), "y": Rows("nodes"), "target": Rows("graphs"),
}  # fmt: skip
_TYPED = {**_ROWS, "edge_type": Rows("edges")}
_HYPER = {
    "x": Rows("nodes"), "node": Rows("pairs", into="nodes"), "hyperedge": Rows("pairs", into="hyperedges"),
    "hyperedge_attr": Rows("hyperedges"), "y": Rows("nodes"),
}  # fmt: skip


def _perceptron(inputs: int, outputs: int) -> nn.Module:
    return gnn.GINConv(nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs)))


_LAYERS: dict[str, Any] = {
    "GCN": (gnn.GCNConv, nn.LayerNorm), "GAT": (gnn.GATConv, nn.LayerNorm),
    "GATv2": (gnn.GATv2Conv, nn.LayerNorm), "GIN": (_perceptron,), "SAGE": (gnn.SAGEConv,),
    "TransformerConv": (gnn.TransformerConv,),
}  # fmt: skip
"""Convolutions with a norm of each node alone, which micro-batches know, or with a BatchNorm."""


def _of_edges(build: Any) -> Case:
    return Case(
        "nodes, edges, graphs", build, _graph, _loaded, _ROWS,
        partial(_fields, keys=tuple(_ROWS)), recognised=True, splits=SPLITS,
    )  # fmt: skip


def _of_types() -> Case:
    sample = partial(_graph, typed=True)
    return Case(
        "nodes, edges, graphs", partial(Network, partial(gnn.RGCNConv, num_relations=RELATIONS)), sample,
        _loaded, _TYPED, partial(_fields, keys=tuple(_TYPED)), recognised=True, splits=SPLITS,
    )  # fmt: skip


CASES = {
    **{name: _of_edges(partial(Network, *layers)) for name, layers in _LAYERS.items()},
    "GPSConv": _of_edges(Transformed),
    "R-GCN": _of_types(),
    "HypergraphConv": Case(
        "nodes, hyperedges, pairs", Hyper, _hypergraph, _loaded, _HYPER,
        _pairs, recognised=True, splits=SPLITS,
    ),
}  # fmt: skip
