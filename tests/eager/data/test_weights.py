"""`weights=` of `fxdp.data_loader`, and batches of graphs: one device's, cut evenly where samples end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.eager.data.full_batches import Cutting, part_of_rank
from fxdp.eager.data_ranks import DataRanks
from tests.eager.ragged.test_by_hand import GRAPHS, graphs, joined
from tests.eager.ragged.test_recognised import GraphBatch, with_ptr
from tests.eager.virtual import on_virtual_ranks
from tests.rank_pool import RankPool

NODES = [2, 9, 1, 4, 3, 12, 1, 2, 6, 1, 5]
BATCH = 6
DIMS = GRAPHS | {"sizes": fxdp.Rows("graphs", lengths="nodes")}


class Graphs(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(NODES)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return graphs(index, [NODES[index]])


def _collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return joined(samples) | {"sizes": torch.tensor([len(one["x"]) for one in samples])}


def _dict_of(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value.full().tolist() for key, value in batch.items()}


def _epoch(state: dict[str, Any] | None = None, stop: int = 9) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """The batches of an epoch, the sizes of the ranks' parts, and the position after `stop` batches."""
    loader = fxdp.data_loader(
        Graphs(), BATCH, shuffle=True, seed=3, weights=NODES, collate_fn=_collate, batch_dims=DIMS
    )
    if state is not None:
        loader.load_state_dict(state)
    found, sizes = [], []
    for batch in loader:
        found.append(_dict_of(batch))
        sizes.append([batch[key].local_sizes for key in ("x", "y", "edge_index")])
        if len(found) == stop:
            break
    return found, sizes, loader.state_dict()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor) -> Tensor:
        source, target = edge_index
        h = self.norm(self.layer(x))
        h = h.index_add(0, target, h[source])
        pooled = h.new_zeros(len(y), 4).index_add(0, batch, h.relu())
        return F.mse_loss(self.out(pooled).squeeze(1), y)


def _trained() -> list[float]:
    """Losses of a compiled graph network on local parts."""
    order = ("x", "edge_index", "batch", "y")
    model = fxdp.compile(
        Network().double(), batch_dims=(tuple(GRAPHS[key] for key in order), {}), backend="eager"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    options = {"collate_fn": _collate, "batch_dims": DIMS, "local": True}
    for batch in fxdp.data_loader(Graphs(), BATCH, shuffle=True, weights=NODES.__getitem__, **options):
        loss = model(*(batch[key] for key in order))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _all(state: dict[str, Any]) -> tuple[Any, ...]:
    return _epoch(), _epoch(state), _trained()


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_ranks_has_the_batches_of_one_device(ranks: RankPool, world: int) -> None:
    expected, _, _ = _epoch()
    _, _, state = _epoch(stop=1)
    losses = _trained()
    for (found, sizes, _), (resumed, _, _), trained in ranks.run(world, _all, state):
        assert found == expected
        assert resumed == expected[1:]
        assert trained == pytest.approx(losses, rel=1e-9)
        assert max(sizes[0][0]) <= {2: 1.05, 4: 1.7}[world] * sum(sizes[0][0]) / world  # one has 12 nodes


@pytest.mark.parametrize("parts", [(4, 2), (1, 0, 5)])
def test_graphs_are_cut_where_the_samples_are(parts: tuple[int, ...]) -> None:
    batch, full = GraphBatch(with_ptr(graphs(0, [3, 2, 4, 1, 1, 2]))), Cutting(None, None, 1, local=False)
    nodes = torch.tensor([3, 2, 4, 1, 1, 2]).split(parts)

    def on_rank(ranks: DataRanks) -> Any:
        found = part_of_rank(batch, ranks, ranks.axis(parts), full)
        x, y = (found.stores[0][key] for key in ("x", "y"))
        assert torch.equal(x.full(), batch.stores[0]["x"])
        return x.local_sizes, y.local_sizes

    for found in on_virtual_ranks(len(parts), on_rank):
        assert found == (tuple(int(one.sum()) for one in nodes), parts)


def test_weights_that_do_not_fit_are_refused() -> None:
    for weights, text in (
        ([1, 2], r"weights of shape \[2\] for 11 samples"),
        ([1] * 10 + [-1], "weight of sample 10 is -1.0"),
        (["a"] * 11, "weights is a list; expected numbers"),
    ):
        with pytest.raises(fxdp.InputError, match=text):
            fxdp.data_loader(Graphs(), BATCH, weights=weights)  # type: ignore[arg-type]
    with pytest.raises(fxdp.InputError, match="weights= of samples that have no index"):
        fxdp.data_loader(iter([1]), BATCH, weights=[1])
    other = fxdp.data_loader(Graphs(), BATCH, shuffle=True, seed=3, weights=[1] * 11)
    with pytest.raises(fxdp.InputError, match="weights is"):
        other.load_state_dict(_epoch(stop=1)[2])


def test_a_list_has_no_part_as_plain_tensors() -> None:
    batch = {"images": [torch.ones(1), torch.ones(2)], "x": torch.ones(2)}
    dims = {"images": fxdp.Rows("samples", dim=None), "x": 0}
    loader = fxdp.data_loader([0, 1], 2, collate_fn=lambda _: batch, batch_dims=dims, local=True)
    with pytest.raises(fxdp.InputError, match=r"\['images'\] is a list .* or local=False"):
        next(iter(loader))
