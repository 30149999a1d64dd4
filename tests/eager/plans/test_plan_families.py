"""A batch of another size asks no rule again, and is exact where its size is that of other dims."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxdp.eager.plans import op_plan
from tests.eager.programs import Batch, gradients
from tests.eager.running import EXACT, OnRanks, difference, on_one_device, plain
from tests.rank_pool import RankPool


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv1d(2, 5, 3), nn.BatchNorm1d(5), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(),
        nn.Linear(15, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 3),
    )  # fmt: skip


def _step(model: nn.Module, batch: Batch, size: int, pairs: bool = True) -> dict[str, Any]:
    x, y = batch(torch.randn(size, 2, 8), torch.randint(3, (size,)))
    noisy = x + 0.1 * torch.randn(x.size(0), 1, 8)
    out = model(noisy)
    loss = F.cross_entropy(out, y, label_smoothing=0.1) + out.view(x.size(0), -1, 3).square().mean()
    loss = loss + out[:, 0].sum() + out[-1].sum()
    if pairs:
        similar: Tensor = out @ out.t() - 9 * torch.eye(len(x))
        loss = loss + F.cross_entropy(similar, torch.arange(len(x)))
    loss.backward()
    found = {"loss": loss.detach(), "correct": (out.argmax(1) == y).sum(), **gradients(model)}
    model.zero_grad()
    return found


def _errors(splits: list[tuple[int, ...]]) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    of_one, of_ranks = _model(), _model()
    found = {}
    for number, split in enumerate(splits):
        torch.manual_seed(number)
        expected = plain(_step(of_one, on_one_device, sum(split)))
        torch.manual_seed(number)
        found[str(split)] = difference(expected, plain(_step(of_ranks, OnRanks(split), sum(split))))
    return found


def test_batches_of_other_sizes_are_exact(ranks: RankPool) -> None:
    splits = [(5, 4), (6, 5), (5, 3), (2, 3), (2, 1), (0, 2), (1, 0), (6, 9), (0, 13)]
    for found in ranks.run(2, _errors, splits):
        assert not {split: where for split, where in found.items() if where[0] > EXACT}


def _searches() -> int:
    model = _model()
    _step(model, OnRanks((7, 6)), 13, pairs=False)
    with mock.patch.object(op_plan, "hypotheses", wraps=op_plan.hypotheses) as search:
        _step(model, OnRanks((4, 7)), 11, pairs=False)
        return len([call for call in search.call_args_list if call.args[2] is not None])


def test_a_shorter_batch_asks_no_rule_again(ranks: RankPool) -> None:
    for searches in ranks.run(2, _searches):
        assert searches == 1  # dropout: which numbers are drawn depends on strides
