"""Gradients of tables that are read with `sparse=True` stay sparse, and are those of one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.eager.programs import Batch
from tests.eager.running import EXACT, OnRanks, difference, on_one_device, plain
from tests.rank_pool import RankPool

_ROWS, _DIM = 11, 3


def _data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, _ROWS, (8, 4)), torch.randn(8, _DIM)


def _sparse(grad: Tensor | None) -> dict[str, Any]:
    assert type(grad) is Tensor
    assert grad.layout is torch.sparse_coo
    grad = grad.coalesce()
    return {"indices": grad.indices(), "values": grad.values()}


def padding_and_two_reads(batch: Batch) -> dict[str, Any]:
    ids, y = batch(*_data())
    table, seen = nn.Embedding(_ROWS, _DIM, padding_idx=2, sparse=True), []
    table.weight.register_hook(lambda grad: seen.append(grad.layout))
    for _ in range(2):  # the second time gradients are added
        F.mse_loss(table(ids).tanh().mean(1) + table(ids[:, 0].add(1).remainder(_ROWS)), y).backward()
    return {**_sparse(table.weight.grad), "layouts": str(seen)}


def tied_to_a_dense_layer(batch: Batch) -> dict[str, Any]:
    (ids, _), found = batch(*_data()), {}
    for first in (True, False):
        table = nn.Embedding(_ROWS, _DIM, sparse=True)
        logits = F.linear(table(ids[:, 0]), table.weight)
        if first:
            F.mse_loss(table(ids[:, 2]), table(ids[:, 3])).backward()
        F.cross_entropy(logits, ids[:, 1]).backward()
        assert table.weight.grad is not None
        found |= {f"{first}": table.weight.grad, f"layout {first}": str(table.weight.grad.layout)}
    return found


def bags(batch: Batch) -> dict[str, Any]:
    (ids, y), found = batch(*_data()), {}
    weights = batch(torch.linspace(0.5, 2, 32).view(8, 4))
    for mode, pad in (("sum", None), ("mean", 3), ("sum", 1)):
        table = nn.EmbeddingBag(_ROWS, _DIM, mode=mode, padding_idx=pad, sparse=True)
        scale = nn.Parameter(torch.tensor(1.5))
        given = {"per_sample_weights": weights * scale} if mode == "sum" else {}
        F.mse_loss(table(ids, **given), y).backward()
        starts = torch.arange(0, ids.numel(), 4)
        F.mse_loss(table(ids.reshape(-1), starts).exp(), y).backward()
        for name, value in _sparse(table.weight.grad).items():
            found[f"{mode} {pad} {name}"] = value
        if given:
            found[f"scale {pad}"] = scale.grad
    return found


def rows_of_bounded_norm(batch: Batch) -> dict[str, Any]:
    (ids, y), found = batch(*_data()), {}
    for table in (
        nn.Embedding(_ROWS, _DIM, max_norm=0.5, sparse=True),
        nn.EmbeddingBag(_ROWS, _DIM, max_norm=0.5, sparse=True),
    ):
        read = table(ids)
        F.mse_loss(read.mean(1) if read.dim() == 3 else read, y).backward()
        found |= {f"{type(table).__name__} {k}": v for k, v in _sparse(table.weight.grad).items()}
        found[type(table).__name__] = table.weight
    return found


def optimizers(batch: Batch) -> dict[str, Any]:
    (ids, y), found = batch(*_data()), {}
    for optimizer in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam):
        model = nn.Sequential(nn.EmbeddingBag(_ROWS, _DIM, sparse=True))
        steps = optimizer(model.parameters(), lr=0.1)
        with torch.sparse.check_sparse_tensor_invariants(True):
            for _ in range(2):
                steps.zero_grad()
                F.mse_loss(model(ids), y).backward()
                steps.step()
        found[optimizer.__name__] = model[0].weight
    return found


_CASES = (padding_and_two_reads, tied_to_a_dense_layer, bags, rows_of_bounded_norm, optimizers)


def _errors(split: tuple[int, ...]) -> dict[str, tuple[float, str]]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for case in _CASES:
        torch.manual_seed(0)
        expected = plain(case(on_one_device))
        torch.manual_seed(0)
        found[case.__name__] = difference(expected, plain(case(OnRanks(split))))
    return found


def test_gradients_stay_sparse_and_are_those_of_one_device(ranks: RankPool) -> None:
    for found in ranks.run(3, _errors, (5, 0, 3)):
        assert not {name: where for name, where in found.items() if where[0] > EXACT}
