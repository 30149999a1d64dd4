"""A family of torch_geometric is a class of its models, dense layers or convolutions.

A batch is as many graphs of one size; those that do not take dense ones are put into one graph, as its own
loader does. Batches of graphs that differ in size are ragged: fxdp refuses them, and says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from benchmarks.conformance.libraries.entries import Families, Member, WithLoss, first_that_runs
from tests.zoo.entry import Entry, Inputs

NODES, EDGES, WIDTH, KINDS = 5, 12, 8, 3
SIZES: dict[str, Any] = {
    "in_channels": WIDTH, "hidden_channels": WIDTH, "out_channels": WIDTH, "channels": WIDTH,
    "num_features": WIDTH, "edge_dim": WIDTH, "dim": WIDTH, "emb_dim": WIDTH, "embedding_dim": WIDTH,
    "edge_type_emb_dim": WIDTH, "edge_attr_emb_dim": WIDTH, "channel_list": [WIDTH] * 3,
    "num_layers": 2, "num_timesteps": 2, "depth": 2, "num_heads": 2, "heads": 2, "num_blocks": 1, "layer": 1,
    "num_stacks": 1, "num_interactions": 1, "num_nodes": NODES, "num_classes": KINDS, "num_embeddings": 9,
    "num_relations": KINDS, "num_types": KINDS, "num_node_types": KINDS, "num_edge_types": KINDS,
    "K": 2, "k": 2, "kernel_size": 2, "filter_size": 2, "space_dimensions": 4, "propagate_dimensions": 4,
    "num_filters": 16,
    "num_gaussians": 8, "hidden_node_channels": 16, "hidden_edge_channels": 16, "num_bilinear": 2,
    "num_spherical": 3, "num_radial": 2, "int_emb_size": 8, "basis_emb_size": 8, "out_emb_channels": 8,
    "alpha": 0.1, "theta": 0.5, "att_type": "MX", "mode": "cat", "aggregators": ["mean", "max", "std"],
    "scalers": ["identity", "amplification"], "deg": torch.tensor([1, 2, 4, 4, 2, 1]), "first_aggr": True,
}  # fmt: skip
"""Sizes by the name of the argument."""
MODULES: dict[str, Callable[[], nn.Module]] = {
    "nn": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)),
    "mlp": lambda: gnn.MLP([WIDTH, WIDTH]),
    "conv": lambda: gnn.GCNConv(WIDTH, WIDTH),
    "model": lambda: gnn.GCN(WIDTH, WIDTH, 2),
    "encoder": lambda: gnn.GCN(WIDTH, WIDTH, 2),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "act": lambda: nn.ReLU(),
}
"""Parts that a model is given."""
OWN: dict[str, dict[str, Callable[[], Any]]] = {
    "EdgeConv": {"nn": lambda: nn.Linear(2 * WIDTH, WIDTH)},
    "HypergraphConv": {"heads": lambda: 1},
    "MLP": {"channel_list": lambda: SIZES["channel_list"]},
    "NNConv": {"nn": lambda: nn.Linear(WIDTH, WIDTH * WIDTH)},
    "PNA": {name: partial(SIZES.get, name) for name in ("aggregators", "scalers", "deg")},
    "PointGNNConv": {
        "mlp_h": lambda: nn.Linear(WIDTH, 3),
        "mlp_f": lambda: nn.Linear(WIDTH + 3, WIDTH),
        "mlp_g": lambda: nn.Linear(WIDTH, WIDTH),
    },
    "PPFConv": {"local_nn": lambda: nn.Linear(WIDTH + 4, WIDTH)},
    "PointNetConv": {"local_nn": lambda: nn.Linear(WIDTH + 3, WIDTH)},
    "RGATConv": {"dim": lambda: 1},
}
"""What a model cannot do without: parts whose sizes follow from what it computes before them, settings."""


def families() -> Families:
    """All classes that its lists of models, dense layers and convolutions have."""
    names = dict.fromkeys([*gnn.models.classes, *gnn.dense.__all__, *gnn.conv.classes])
    found = {name: getattr(gnn, name, None) for name in names}
    modules = {name: c for name, c in found.items() if isinstance(c, type) and issubclass(c, nn.Module)}
    return {name: partial(_smallest, c) for name, c in modules.items() if c is not gnn.MessagePassing}


def _smallest(made: type[nn.Module]) -> Member:
    entries = [Entry(partial(_build, made, given), partial(_inputs, made, given)) for given in _GIVEN]
    return first_that_runs((made.__name__, entry) for entry in entries)


_GIVEN: tuple[tuple[str, ...], ...] = (
    (),
    ("batch",),
    ("edge_attr", "batch"),
    ("edge_weight", "edge_attr", "batch"),
    ("edge_type",),
)
"""Optional inputs that are given."""


def _build(made: type[nn.Module], given: tuple[str, ...]) -> nn.Module:
    parameters = inspect.signature(made).parameters.values()
    sizes = {p.name: SIZES[p.name] for p in parameters if p.name in SIZES and _is_set(p, given)}
    parts = {p.name: MODULES[p.name]() for p in parameters if p.name in MODULES and p.default is p.empty}
    parts |= {name: make() for name, make in OWN.get(made.__name__, {}).items()}
    built = made(**sizes | parts)
    if not list(built.parameters()):
        built = _Encoded(built)
    return WithLoss(built if "adj" in inspect.signature(made.forward).parameters else _OneGraph(built))


def _is_set(parameter: inspect.Parameter, given: tuple[str, ...]) -> bool:
    """Whether a size must be given, or is better small; features of edges have one where there are some."""
    if parameter.default is parameter.empty:
        return True
    if parameter.name == "edge_dim":
        return "edge_attr" in given
    return isinstance(parameter.default, int) and parameter.name not in ("k", "K")


def _inputs(made: type[nn.Module], given: tuple[str, ...], batch: int) -> Inputs:
    found = {}
    for name, parameter in inspect.signature(made.forward).parameters.items():
        if name in _MAKERS and (
            parameter.default is parameter.empty or name in given or name in ("x", "pos")
        ):
            found[name] = _MAKERS[name](batch)
    return found


_MAKERS: dict[str, Callable[[int], Tensor]] = {
    "x": lambda b: torch.randn(b, NODES, WIDTH),
    "x_0": lambda b: torch.randn(b, NODES, WIDTH),
    "h": lambda b: torch.randn(b, NODES, WIDTH),
    "input": lambda b: torch.randn(b, NODES, WIDTH),
    "z": lambda b: torch.randint(1, 5, (b, NODES)),
    "pos": lambda b: torch.randn(b, NODES, 3),
    "adj": lambda b: (torch.rand(b, NODES, NODES) < 0.5).to(torch.get_default_dtype()),
    "edge_index": lambda b: torch.randint(0, NODES, (b, 2, EDGES)),
    "pos_edge_index": lambda b: torch.randint(0, NODES, (b, 2, EDGES)),
    "neg_edge_index": lambda b: torch.randint(0, NODES, (b, 2, EDGES)),
    "edge_weight": lambda b: torch.rand(b, EDGES),
    "edge_attr": lambda b: torch.rand(b, EDGES, WIDTH),
    "edge_type": lambda b: torch.randint(0, KINDS, (b, EDGES)),
    "hyperedge_index": lambda b: torch.randint(0, NODES, (b, 2, EDGES)),
    "normal": lambda b: torch.randn(b, NODES, 3),
    "node_type": lambda b: torch.randint(0, KINDS, (b, NODES)),
    "type_vec": lambda b: torch.randint(0, KINDS, (b, NODES)),
    "y": lambda b: torch.randint(0, KINDS, (b, NODES)),
    "mask": lambda b: torch.rand(b, NODES) < 0.5,
    "batch": lambda b: torch.zeros(b, NODES, dtype=torch.long),
}


class _Encoded(nn.Module):
    """A model without parameters behind a layer that has some."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.encoder, self.model = nn.Linear(WIDTH, WIDTH), model

    def forward(self, x: Tensor, **inputs: Tensor) -> Any:
        return self.model(self.encoder(x), **inputs)


class _OneGraph(nn.Module):
    """Graphs of one size as one graph: nodes one after another, edges between their own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        graphs = next(iter(inputs.values())).shape[0]
        first = torch.arange(graphs) * NODES
        flat = {name: value.flatten(0, 1) for name, value in inputs.items()}
        for name in (name for name in inputs if name.endswith("edge_index")):
            flat[name] = (inputs[name] + first.view(-1, 1, 1)).transpose(0, 1).flatten(1)
        if "batch" in inputs:
            flat["batch"] = (inputs["batch"] + torch.arange(graphs).view(-1, 1)).flatten()
        return self.model(**flat)
