"""Tables read with `sparse=True` in compiled modules: their gradients stay sparse, and are one device's."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.errors import CaptureError, FxdpError, MeshError
from fxdp.ir.ops.sparse_rows import SPARSE_ROWS, sparse_gradient
from tests.rank_pool import RankPool


class _Recommender(nn.Module):
    """Two sparse tables, one of them read twice and with padding, and a third that is tied to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(11, 3, padding_idx=2, sparse=True)
        self.items = nn.EmbeddingBag(7, 3, mode="mean", sparse=True)
        self.tied = nn.Embedding(7, 3, sparse=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.user(x).tanh().mean(1) + self.user((x[:, 0] + 1) % 11) + self.items(x % 7)
        return F.mse_loss(F.linear(h + self.tied(x[:, 1] % 7), self.tied.weight), y)


def _model_and_batch() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = _Recommender().double()
    return model, (torch.randint(0, 11, (8, 4)), torch.randn(8, 7, dtype=torch.float64))


def test_every_rank_has_the_rows_of_all() -> None:
    model, batch = _model_and_batch()
    report = fxdp.verify(model, batch, mesh={"dp": 3}, splits=[[5, 0, 3], [1, 1, 6]])
    assert report.ok, str(report)


def test_gradients_are_sparse_tensors_and_accumulate() -> None:
    model, batch = _model_and_batch()
    twin = deepcopy(model)
    compiled = fxdp.compile(model, backend="eager")
    for call in (twin, compiled, twin, compiled):
        call(*batch).backward()
    for (name, got), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert got.grad is not None
        assert expected.grad is not None
        assert got.grad.layout is expected.grad.layout, name
        if got.grad.is_sparse:
            assert got.grad.coalesce().indices().equal(expected.grad.coalesce().indices()), name
        torch.testing.assert_close(got.grad.to_dense(), expected.grad.to_dense(), rtol=1e-12, atol=1e-12)


class _ReadOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Embedding(11, 7, padding_idx=2, sparse=True, dtype=torch.float64)
        self.item = nn.Embedding(7, 7, sparse=True, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.user(x).tanh().mean(1) + self.item(x[:, 0] % 7), y)


def _squares() -> tuple[Tensor, Tensor]:
    return torch.arange(32).view(8, 4) ** 2 % 11, torch.ones(8, 7, dtype=torch.float64)


def _rows(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The indices of each gradient's rows, and the gradient as a dense one."""
    found = [p.grad.coalesce() for p in model.parameters() if p.grad is not None]
    return [(one.indices(), one.to_dense()) for one in found]


def _in_microbatches() -> list[tuple[Tensor, Tensor]]:
    model, batch = _ReadOnce(), _squares()
    compiled = fxdp.compile(model, backend="eager", pipeline=fxdp.Pipeline(microbatches=3))
    compiled(*(value.split([7, 0, 1])[dist.get_rank()] for value in batch)).backward()
    return _rows(model)


def test_rows_of_micro_batches_are_gathered_once(ranks: RankPool) -> None:
    model, batch = _ReadOnce(), _squares()
    model(*batch).backward()
    for found in ranks.run(3, _in_microbatches):
        torch.testing.assert_close(found, _rows(model), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{"strategy": "shard"}, {"strategy": "optimizer"}, {"pipeline": fxdp.Pipeline(microbatches=2)}]
)
def test_refused_where_gradients_are_sharded_or_added_up(options: dict[str, object]) -> None:
    model, batch = _model_and_batch()
    said = r"test_sparse_lookups.py:\d+.* (user|items).weight is read with sparse=True.*pass sparse=False"
    with pytest.raises(MeshError, match=said):
        fxdp.plan(model, batch, mesh={"dp": 2}, **options)  # type: ignore[arg-type]


def test_a_table_that_is_computed_is_refused_by_line() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 2))

        def forward(self, x: Tensor) -> Tensor:
            return F.embedding(x, self.weight * 2, sparse=True).sum()

    with pytest.raises(CaptureError, match=r"test_sparse_lookups.py:\d+.*sparse=False") as caught:
        fxdp.plan(Scaled(), (torch.tensor([[0, 1], [2, 4]]),), mesh={"dp": 2})
    assert isinstance(caught.value, FxdpError)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [200, 256, 70_000, 2**24, 2**40])
def test_an_index_is_exact_in_every_dtype(dtype: torch.dtype, count: int) -> None:
    indices = torch.tensor([0, 1, count // 3, count - 2, count - 1, 1])
    rows = torch.arange(12, dtype=dtype).view(6, 2)
    packed = SPARSE_ROWS(rows, indices, count, 1)
    got = sparse_gradient(packed, torch.Size([count, 2]))
    assert got._indices().tolist() == [[0, count // 3, count - 2, count - 1]]
    assert got._values().equal(rows[[0, 2, 3, 4]])
