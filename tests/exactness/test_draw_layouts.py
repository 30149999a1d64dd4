"""`rng="single-device"` where activations do not lie in memory in the order of their dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from tests.exactness.cases import Model
from tests.lockstep import check
from tests.ranks import RankPool

SPLITS = ((8,), (4, 3), (5, 2, 0, 1))
FIRST: dict[str, Any] = {"memory_format": torch.channels_last}

LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "channels_last": lambda conv, x: F.dropout(conv(x.to(**FIRST)).relu()),
    "permuted": lambda conv, x: F.dropout(conv(x).permute(0, 2, 3, 1)),
    "batch_last": lambda conv, x: F.dropout(conv(x).permute(1, 3, 2, 0)),
    "sliced": lambda conv, x: F.dropout(conv(x).transpose(1, 3)[:, 1:3]),
    "expanded": lambda conv, x: F.dropout(x.transpose(1, 3)[:, :, None].expand(-1, -1, 2, -1, -1)),
    "expanded_over_the_batch": lambda conv, x: F.dropout(
        conv.weight.flatten(1)[:, None].expand(-1, x.shape[0], -1)
    ),
    "chosen_by_the_data": lambda conv, x: torch.rand_like(conv(x)[x[:, 0, 0, 0] > 0].transpose(1, 2)),
    "in_place": lambda conv, x: F.alpha_dropout(conv(x).transpose(1, 3), training=True),
    "noise": lambda conv, x: conv(x).transpose(0, 2) + torch.randn_like(x.transpose(0, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers_are_drawn_in_the_order_of_eagers_memory(name: str) -> None:
    model, x = _subject(name, 8)
    check(model, (x,), splits=SPLITS, rng="single-device")


def _train(split: list[int], names: tuple[str, ...]) -> list[Tensor]:
    """This rank's part of each layout's output; the compiler must know how it lies."""
    outs = []
    for name in names:
        model, x = _subject(name, sum(split))
        compiled = fxdp.compile(model, rng="single-device")
        torch.manual_seed(5)
        outs.append(compiled(x.split(split)[dist.get_rank()]).detach())
    return outs


def _subject(name: str, batch: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 3, 3, padding=1, dtype=torch.float64)
    model = Model(lambda conv, x: LAYOUTS[name](conv, x).tanh(), conv)
    return model, torch.randn(batch, 3, 4, 4, dtype=torch.float64)


def test_inductor_knows_how_they_lie(ranks: RankPool) -> None:
    names = ("channels_last", "in_place")
    found = ranks.run(2, _train, [3, 2], names, timeout=240)
    for i, name in enumerate(names):
        model, x = _subject(name, 5)
        torch.manual_seed(5)
        torch.testing.assert_close(torch.cat([outs[i] for outs in found]), model(x), rtol=1e-12, atol=1e-12)
