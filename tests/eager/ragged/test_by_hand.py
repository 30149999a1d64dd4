"""Structures that `fxdp.Rows` describes: graphs, bags, concatenated targets, on very uneven ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxdp import Rows
from tests.eager.ragged.comparing import error_of, refusal_of, trained

DOUBLE = torch.float64
GRAPHS = {
    "x": Rows("nodes"),
    "edge_index": Rows("edges", dim=1, into="nodes"),
    "batch": Rows("nodes", into="graphs"),
    "y": Rows("graphs"),
}
NODES = ([], [5, 1, 0, 3]), ([4], []), ([2, 2], [1], [6, 3])
"""Nodes of each graph on each rank; without any graph among them."""


def graphs(seed: int, nodes: Sequence[int], edges: float = 2.0) -> dict[str, Tensor]:
    """A batch of random graphs, of which those with one node have no edge."""
    made = torch.Generator().manual_seed(seed)
    total, first, found = sum(nodes), 0, []
    for n in nodes:
        count = int(edges * n) if n > 1 else 0
        found.append(torch.randint(0, max(n, 1), (2, count), generator=made) + first)
        first += n
    return {
        "x": torch.randn(total, 3, dtype=DOUBLE, generator=made),
        "edge_index": torch.cat([torch.zeros(2, 0, dtype=torch.int64), *found], 1),
        "batch": torch.repeat_interleave(torch.arange(len(nodes)), torch.tensor(nodes, dtype=torch.int64)),
        "y": torch.randn(len(nodes), dtype=DOUBLE, generator=made),
    }


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The batch of one device."""
    nodes = [sum(len(p["x"]) for p in parts[:i]) for i in range(len(parts))]
    before = [sum(len(p["y"]) for p in parts[:i]) for i in range(len(parts))]
    return {
        "x": torch.cat([p["x"] for p in parts]),
        "edge_index": torch.cat([p["edge_index"] + n for p, n in zip(parts, nodes, strict=True)], 1),
        "batch": torch.cat([p["batch"] + n for p, n in zip(parts, before, strict=True)]),
        "y": torch.cat([p["y"] for p in parts]),
    }


class Convolution(nn.Module):
    """One layer of message passing in plain torch: GCN, GIN or GAT."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.score = kind, nn.Linear(3, 3), nn.Linear(6, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index[0], edge_index[1]
        h = self.linear(x)
        if self.kind == "gin":
            return self.linear(x + torch.zeros_like(x).index_add(0, target, x[source]))
        if self.kind == "gcn":
            degree = h.new_zeros(len(h)).index_add(0, target, h.new_ones(len(target))) + 1
            weight = (degree[source] * degree[target]).rsqrt()
            return h / degree[:, None] + torch.zeros_like(h).index_add(0, target, h[source] * weight[:, None])
        scores = F.leaky_relu(self.score(torch.cat([h[source], h[target]], 1)).squeeze(1))
        largest = h.new_full((len(h),), -1e9).scatter_reduce(0, target, scores, "amax")
        weights = (scores - largest[target]).exp()
        sums = h.new_zeros(len(h)).scatter_add(0, target, weights)
        weights = weights / sums[target]
        return torch.zeros_like(h).index_add(0, target, h[source] * weights[:, None])


def graph_task(kind: str) -> Any:
    """Two layers, batch statistics over all nodes, a mean per graph, a loss over graphs."""

    def run(batch: dict[str, Tensor]) -> dict[str, Any]:
        model = nn.ModuleList([Convolution(kind), nn.BatchNorm1d(3), Convolution(kind)])
        h = model[2](F.relu(model[1](model[0](batch["x"], batch["edge_index"]))), batch["edge_index"])
        count = len(batch["y"])
        sums = h.new_zeros(count, 3).index_add(0, batch["batch"], h)
        nodes = torch.bincount(batch["batch"], minlength=count).clamp(min=1)
        loss = F.mse_loss((sums / nodes[:, None]).sum(1), batch["y"])
        return trained(model, loss, nodes=h)

    return run


@pytest.mark.parametrize("kind", ["gcn", "gin", "gat"])
def test_graphs_in_plain_torch(kind: str) -> None:
    for split in NODES:
        parts = [graphs(i, nodes) for i, nodes in enumerate(split)]
        error_of(graph_task(kind), joined(parts), parts, GRAPHS)


def test_ranks_without_any_edge() -> None:
    parts = [graphs(0, [3, 2], edges=0.0), graphs(1, [4])]
    error_of(graph_task("gcn"), joined(parts), parts, GRAPHS)
    none = [graphs(0, [3, 2], edges=0.0), graphs(1, [4], edges=0.0)]
    error_of(graph_task("gin"), joined(none), none, GRAPHS)


def bags(seed: int, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Values of all bags, and where each begins."""
    made = torch.Generator().manual_seed(seed)
    known = torch.tensor(lengths, dtype=torch.int64)
    return {
        "input": torch.randint(0, 9, (sum(lengths),), generator=made),
        "offsets": known.cumsum(0) - known,
        "label": torch.randint(0, 3, (len(lengths),), generator=made),
    }


def bag_task(mode: str) -> Any:
    def run(batch: dict[str, Tensor]) -> dict[str, Any]:
        model = nn.Sequential(nn.EmbeddingBag(9, 4, mode=mode), nn.Linear(4, 3))
        out = model[1](model[0](batch["input"], batch["offsets"]))
        return trained(model, F.cross_entropy(out, batch["label"]), out=out)

    return run


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_recognised_and_described(mode: str) -> None:
    lengths = [2, 0, 4], [], [1], [0, 3, 0]
    parts = [bags(i, one) for i, one in enumerate(lengths)]
    full = bags(0, [n for one in lengths for n in one])
    full["input"] = torch.cat([p["input"] for p in parts])
    full["label"] = torch.cat([p["label"] for p in parts])
    error_of(bag_task(mode), full, parts)
    by_hand = {"input": Rows("words"), "offsets": Rows("samples", starts="words")}
    error_of(bag_task(mode), full, parts, by_hand)


def test_concatenated_targets_of_ctc() -> None:
    lengths = [3, 1], [], [2, 0, 4]
    made = torch.Generator().manual_seed(0)

    def part(known: list[int]) -> tuple[Tensor, ...]:
        x = torch.randn(8, len(known), 3, dtype=DOUBLE, generator=made)
        labels = torch.randint(1, 5, (sum(known),), generator=made)
        return x, labels, torch.full((len(known),), 8), torch.tensor(known, dtype=torch.int64)

    def run(batch: tuple[Tensor, ...]) -> dict[str, Any]:
        model = nn.Linear(3, 5)
        x, labels, times, known = batch
        loss = F.ctc_loss(model(x).log_softmax(-1), labels, times, known, zero_infinity=True)
        return trained(model, loss)

    parts = [part(known) for known in lengths]
    full = tuple(torch.cat([p[i] for p in parts], 1 if i == 0 else 0) for i in range(4))
    error_of(run, full, parts, (1, Rows("labels"), 0, Rows("samples", lengths="labels")))


def test_lists_by_hand_are_of_all_ranks() -> None:
    parts: list[Any] = [[torch.ones(2), {"name": "a"}], [], [torch.zeros(1, 3)]]

    def run(batch: list[Any]) -> dict[str, Any]:
        name = batch[1]["name"]
        return {"count": len(batch), "name": name, "first": batch[0].sum(), "last": batch[2]}

    error_of(run, [item for part in parts for item in part], parts, Rows("items", dim=None))


def test_all_faults_are_told_at_once() -> None:
    first, second = graphs(0, [3, 2]), graphs(1, [4])
    first["edge_index"][0, 1] = 5  # a node of rank 1
    second["batch"] = second["batch"][:3]
    first["batch"][0] = -1
    text = refusal_of([first, second], GRAPHS)
    assert "rank 0, ['edge_index']: 1 values outside of 'nodes', as 5 at [0, 1]; expected 0 to 4" in text
    assert "rank 0, ['batch']: 1 values outside of 'graphs', as -1 at [0]" in text
    assert "rank 1, the axis 'nodes' has 4 rows in ['x'] and 3 rows in ['batch']; expected one number" in text


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([1, 2], "the first value is 1; expected 0"),
        ([0, 3, 2], "the values fall from 3 to 2 at 2"),
        ([0, 7], "the last value is 7; expected at most 4"),
        ([], "no row begins in 'values', which has 4 rows on this rank"),
    ],
)
def test_offsets_that_do_not_fit(offsets: list[int], words: str) -> None:
    good, bad = bags(0, [2, 1]), bags(1, [4])
    bad["offsets"], bad["label"] = torch.tensor(offsets, dtype=torch.int64), torch.zeros(len(offsets)).long()
    assert f"rank 1, ['offsets']: {words}" in refusal_of([good, bad])


def test_elements_of_a_list_that_cannot_be_told() -> None:
    text = refusal_of([[{"boxes": np.zeros(3)}], [{"boxes": np.zeros(0)}]], Rows("images", dim=None))
    assert "rank 0, : an element has a ndarray" in text, text


def test_descriptions_that_do_not_fit() -> None:
    x, y = torch.ones(3, 2), torch.ones(2)
    lengths = refusal_of([(x, torch.tensor([2, 2]))] * 2, (Rows("steps"), Rows("samples", lengths="steps")))
    assert "rank 1, [1]: lengths that add up to 4; expected 3, the rows of 'steps' on this rank" in lengths
    nowhere = refusal_of([(x, y.long())] * 2, (Rows("nodes"), Rows("edges", into="node")))
    assert "into='node' is an axis of which no input has rows; expected one of ['edges', 'nodes']" in nowhere
    tokens = Rows("tokens"), Rows("tokens", within="documents")
    jumps = refusal_of([(x, torch.tensor([0, 1, 0])), (x, torch.tensor([4, 5, 9]))], tokens)
    assert "rank 1, [1]: the first row is 4 within 'documents'; expected 0" in jumps
    assert "rank 1, [1]: 9 after 5 at 2; expected 6, or 0, where a sample begins" in jumps
    floats = refusal_of([(x, y)] * 2, (Rows("nodes"), Rows("edges", into="nodes")))
    assert "into= of a tensor of torch.float32; expected integers" in floats
    other = refusal_of([(x, y), (x.double(), y)], (Rows("nodes"), Rows("edges")))
    assert "[0]: rank 1 passes torch.float64 of ['rows', 2]" in other
    with pytest.raises(ValueError, match="into and starts are given; expected one of them"):
        Rows("a", into="b", starts="c")
