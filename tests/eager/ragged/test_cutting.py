"""One device's ragged batches in a script: each rank keeps its own graphs, documents and bags."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import fxdp
from fxdp.eager.data_ranks import DataRanks
from fxdp.eager.ragged.structure import tensors_in
from fxdp.run.loaders import entered
from fxdp.run.session import RunOptions, Session
from tests.eager.ragged.comparing import error_of
from tests.eager.ragged.test_by_hand import graph_task, graphs
from tests.eager.ragged.test_recognised import (
    GraphBatch,
    packed_task,
    pictures,
    sequences,
    token_task,
    tokens,
    with_ptr,
)  # fmt: skip
from tests.eager.virtual import on_virtual_ranks


def _sizes(batch: Any, world: int, parts: Sequence[int] = ()) -> dict[str, Any]:
    """The sizes of the ranks' parts by key, without what stays as it is; the values are one device's."""

    def on_rank(ranks: DataRanks) -> dict[str, Any]:
        cut = entered(batch, Session(ranks, RunOptions("", parts=tuple(parts))))
        values = cut.stores[0] if isinstance(cut, GraphBatch) else cut
        for key, value in values.items():
            if isinstance(value, fxdp.GlobalTensor):
                given = batch[key]
                assert torch.equal(value.full(), given), key
        return {k: v.local_sizes for k, v in values.items() if isinstance(v, fxdp.GlobalTensor)}

    found = on_virtual_ranks(world, on_rank)
    assert all(one == found[0] for one in found)
    return found[0]


class _Table(UserDict[str, Any]):
    """A mapping whose iterator gives rows, as that of a TensorDict."""

    def __iter__(self) -> Any:
        return iter([{}, {}])

    def keys(self) -> Any:
        return self.data.keys()

    def values(self) -> Any:
        return self.data.values()

    def items(self) -> Any:
        return self.data.items()


def test_a_mapping_is_read_by_its_keys() -> None:
    batch = _Table()
    batch.data = {"x": torch.arange(14.0).view(7, 2), "y": torch.arange(7)}
    assert _sizes(batch, 2) == {"x": (4, 3), "y": (4, 3)}


def test_graphs_stay_on_one_rank_with_even_nodes() -> None:
    batch = GraphBatch(with_ptr(graphs(0, [3, 2, 4])))
    found = _sizes(batch, 2)
    ends = torch.bucketize(batch["edge_index"][0], torch.tensor([5, 9]), right=True).bincount(minlength=2)
    assert found["x"] == found["batch"] == (5, 4)
    assert found["y"] == (2, 1)
    assert found["edge_index"] == tuple(ends.tolist())
    assert "ptr" not in found
    assert _sizes(batch, 4, (5, 1, 1, 1))["y"] == (2, 0, 0, 1)


def test_one_graph_is_cut_inside() -> None:
    assert _sizes(GraphBatch(with_ptr(graphs(0, [7]))), 2)["x"] == (4, 3)


def test_documents_and_images_and_bags() -> None:
    assert _sizes(tokens([5, 1, 2]), 2)["input_ids"] == (5, 3)
    found = _sizes(pictures(0, [(1, 2, 2), (1, 1, 1)], 3), 3)
    assert found == {"input_ids": (1, 1, 1), "image_grid_thw": (0, 1, 1), "pixel_values": (0, 4, 1)}
    bags = {"input": torch.arange(6), "offsets": torch.tensor([0, 4, 4]), "y": torch.ones(3)}
    assert _sizes(bags, 2) == {"input": (4, 2), "offsets": (1, 2), "y": (1, 2)}


@pytest.mark.parametrize("parts", [(3, 1), (1, 1, 1)])
def test_steps_are_those_of_one_device(parts: tuple[int, ...]) -> None:
    """With three ranks the last one has no graph."""

    def enter(batch: Any, ranks: DataRanks, _: Any) -> Any:
        cut = entered(batch, Session(ranks, RunOptions("", parts=parts)))
        assert any(isinstance(value, fxdp.GlobalTensor) for value in tensors_in(cut))
        return cut

    for program, batch in (
        (graph_task("gat"), GraphBatch(with_ptr(graphs(0, [3, 2])))),
        (token_task, tokens([3, 2, 6])),
        (packed_task(nn.LSTM), (pack_sequence(sequences(0, [2, 5]), enforce_sorted=False), torch.ones(2))),
    ):
        error_of(program, batch, [batch] * len(parts), enter=enter)
