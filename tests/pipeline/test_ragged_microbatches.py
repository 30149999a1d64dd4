"""Ragged batches in micro-batches and stages: cut where samples end, equal to one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fxdp
from fxdp.ir.types.sizes import Cuts
from fxdp.pipeline.write.microbatches import MicrobatchSizes
from tests.eager.ragged.test_by_hand import GRAPHS, graphs, joined
from tests.oracle.test_ragged_axes import _BAGS as BAG_ROWS
from tests.oracle.test_ragged_axes import _Bags as Bags
from tests.oracle.test_ragged_axes import _bags as bags_of_lengths
from tests.rank_pool import RankPool

ORDER = ("x", "edge_index", "batch", "y")
DIMS = (tuple(GRAPHS[key] for key in ORDER), {})
NODES = (
    ([2, 5, 1, 3], [7], [], [1, 1]),  # of two data ranks the first two
    ([4], [], [2], [3]),
    ([], [1, 2, 6, 2], [3, 1], [2]),
)
"""The nodes of each graph, by step and rank."""


class _Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(inputs, outputs), nn.LayerNorm(outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        kept = edge_index[:, edge_index[0] != edge_index[1]]
        source, target = torch.cat([kept, torch.arange(len(x)).expand(2, -1)], 1)
        h = self.norm(self.linear(x))
        return torch.zeros_like(h).index_add(0, target, h[source]).relu()


class _Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.out = _Layer(3, 8), _Layer(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor) -> Tensor:
        h = self.second(self.first(x, edge_index), edge_index)
        pooled = h.new_zeros(len(y), 8).index_add(0, batch, h)
        return F.mse_loss(self.out(pooled).squeeze(1), y, reduction="none")[y > -0.5].mean()


def _full(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _steps(model: Any, batches: list[dict[str, Tensor]]) -> list[Any]:
    """Losses and gradients by step."""
    found = []
    for batch in batches:
        loss = model(*(batch[key] for key in ORDER))
        loss.backward()
        found += [loss.detach(), *(_full(p.grad).clone() for p in model.parameters())]
        model.zero_grad()
    return found


def _on_ranks(options: dict[str, Any], stages: int) -> list[Any]:
    world, mesh = dist.get_world_size(), None
    if stages > 1:
        mesh = init_device_mesh("cpu", (stages, world // stages), mesh_dim_names=("pp", "dp"))
    compiled = fxdp.compile(_Graph().double(), mesh, batch_dims=DIMS, backend="eager", **options)
    rank = compiled.mesh.rank
    return _steps(compiled, [graphs(10 * i + rank, one[rank]) for i, one in enumerate(NODES)])


@pytest.mark.parametrize(
    ("stages", "options"),
    [
        (1, {"strategy": "shard", "pipeline": {"microbatches": 3}}),
        (2, {"pipeline": {"microbatches": 2, "stages": ["second"]}}),
    ],
)
def test_steps_are_those_of_one_device(ranks: RankPool, stages: int, options: dict[str, Any]) -> None:
    data = 4 // stages
    full = [joined([graphs(10 * i + r, one[r]) for r in range(data)]) for i, one in enumerate(NODES)]
    expected = _steps(_Graph().double(), full)
    for found in ranks.run(4, _on_ranks, options, stages):
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


class _Selected(nn.Module):
    """Rows that values select: how many is known of the inputs, or of no micro-batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.how = nn.Linear(3, 4), nn.Linear(4, 2), how

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        rows = h[(h if self.how == "of activations" else x).sum(1) > 0]
        out = self.second(rows)
        if self.how == "their places":
            return (out.sum(1) * torch.arange(len(out))).sum(), out
        return out.square().mean(), torch.stack([out, out]).flatten(0, 1) if self.how == "twice" else out


def test_selected_rows_whose_number_the_inputs_tell() -> None:
    batch = [graphs(0, [2, 5, 1, 3])[key] for key in ORDER]
    expected = _Selected("of inputs").double()(*batch)
    options: dict[str, Any] = {"pipeline": {"microbatches": 3}, "backend": "eager", "batch_dims": DIMS}
    found = fxdp.compile(_Selected("of inputs").double(), **options)(*batch)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for how, message in (
        ("of activations", "exchange_sizes for rows of each rank"),
        ("their places", "exchange_sizes for rows of each rank"),
        ("twice", "that data select in each micro-batch"),
    ):
        with pytest.raises(fxdp.StageError, match=message):
            fxdp.compile(_Selected(how).double(), **options)(*batch)
    options["pipeline"]["stages"] = ["second"]
    with pytest.raises(fxdp.StageError, match="data decide how many rows"):
        fxdp.plan(_Selected("of inputs").double(), batch, mesh={"pp": 2, "dp": 1}, **options)


class _Loss(nn.Module):
    def __init__(self, by: str) -> None:
        super().__init__()
        self.bags = Bags(by)

    def forward(self, *batch: Tensor) -> Tensor:
        loss: Tensor = self.bags(*batch)[1]
        return loss


BAGS = {"bags": ([2, 0, 3], [4, 1, 2, 1]), "lengths": ([], [0, 3, 2]), "ctc": ([2, 1, 3], [4, 1, 2, 1])}
"""The lengths of the bags of each rank."""


def _bags_of(lengths: tuple[list[int], ...]) -> list[tuple[Tensor, ...]]:
    torch.manual_seed(1)
    return [bags_of_lengths(one) for one in lengths]


def _bags_on_ranks() -> list[Any]:
    found = []
    for by, lengths in BAGS.items():
        compiled = fxdp.compile(
            _Loss(by), batch_dims=(BAG_ROWS, {}), backend="eager", pipeline={"microbatches": 3}
        )
        loss = compiled(*_bags_of(lengths)[dist.get_rank()])
        loss.backward()
        found.append((loss.detach(), compiled.bags.table.weight.grad))
    return found


def test_bags_and_targets_of_ctc_are_cut_between_samples(ranks: RankPool) -> None:
    expected = []
    for by, lengths in BAGS.items():
        model, parts = _Loss(by), _bags_of(lengths)
        full = list(bags_of_lengths([n for one in lengths for n in one]))  # its starts and bounds
        for i in (0, 1, 5):
            full[i] = torch.cat([part[i] for part in parts])
        loss = model(*full)
        loss.backward()
        expected.append((loss.detach(), model.bags.table.weight.grad))
    for found in ranks.run(2, _bags_on_ranks):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_sizes_of_each_axis() -> None:
    full = {"B": 9, "b": 6, "offset": 3, "B_edges": 5, "b_edges": 5, "offset_edges": 0}
    layout = MicrobatchSizes.of(full, 2, cuts={"": (2,), "edges": (4,)})
    assert layout.bounds == ((0, 2), (2, 4))
    assert layout.along("edges") == [(0, 4), (4, 1)]
    assert layout.sizes[1] == full | {"b": 4, "offset": 5, "b_edges": 1, "offset_edges": 4}
    even = MicrobatchSizes.of(full, 2)
    assert (even.bounds, even.along("edges")) == (((0, 3), (3, 3)), [(0, 3), (3, 2)])


_NODES = ([2, 5, 1, 3, 4], [1, 2, 6, 2, 1])
"""The nodes of each graph of the global batch, by step."""


def _in_blocks(parts: tuple[int, ...], stages: int = 1, **options: Any) -> list[Any]:
    """Losses and gradients of two steps in blocks of two graphs; `parts` are the graphs of each rank."""
    shape, axes = (stages, len(parts)), ("pp", "dp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes) if stages > 1 else None
    rank, batches = dist.get_rank() % len(parts), []
    own = range(sum(parts[:rank]), sum(parts[: rank + 1]))
    for i, nodes in enumerate(_NODES):
        made = [graphs(10 * i + number, [nodes[number]]) for number in own]
        batches.append(joined(made) if made else graphs(0, []))
    numerics = fxdp.Bitwise(block=2)
    compiled = fxdp.compile(
        _Graph().double(), mesh, batch_dims=DIMS, **{"backend": "eager", "numerics": numerics, **options}
    )
    return _steps(compiled, batches)


def test_blocks_of_graphs_have_the_bits_of_one_device(ranks: RankPool) -> None:
    (alone,) = ranks.run(1, _in_blocks, (5,))
    on_ranks = ranks.run(3, _in_blocks, (2, 0, 3), strategy="shard")
    on_stages = ranks.run(4, _in_blocks, (4, 1), 2, strategy="shard")
    for found in (*on_ranks, *on_stages):
        assert all(map(torch.equal, found, alone))


def test_blocks_that_inductor_compiles_are_refused() -> None:
    compiled = fxdp.compile(_Graph(), batch_dims=DIMS, numerics=fxdp.Bitwise(block=2))
    batch = graphs(0, [2, 3])
    with pytest.raises(fxdp.InputError, match=r'a ragged batch .* expected backend="eager" on every mesh'):
        compiled(*(batch[key].float() if batch[key].is_floating_point() else batch[key] for key in ORDER))


def test_sizes_of_blocks_of_a_rank() -> None:
    full = {"B": 9, "b": 4, "offset": 5, "B_edges": 7, "b_edges": 3, "offset_edges": 4}
    cuts = Cuts((4, 3), (), {"": (4,), "edges": (3,)})
    layout = MicrobatchSizes.of_ragged_blocks(full, 2, 1, cuts)
    assert (layout.bounds, layout.along("edges")) == (((0, 4), (4, 0)), [(0, 3), (3, 0)])
    assert (layout.first, layout.blocks, layout.is_empty) == (2, 4, False)
    none = MicrobatchSizes.of_ragged_blocks(full | {"b": 0}, 2, 1, Cuts((7, 0), (), {"": (), "edges": ()}))
    assert (none.first, none.blocks, none.is_empty) == (4, 4, True)
