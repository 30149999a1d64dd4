from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.ir.ops.rank_extrema import restored, sortable
from tests.fallbacks import no_fallback
from tests.rank_pool import RankPool

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_keep_their_order_as_integers(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    rising = torch.tensor([-INF, -3.5, -1.0, -tiny, -0.0, 0.0, tiny, 1.0, 3.5, INF], dtype=dtype)
    for op in ("max", "min"):
        keys = sortable(rising, op)
        assert all(a < b for a, b in pairwise(keys.tolist()))
        assert torch.equal(restored(keys, dtype).signbit(), rising.signbit())
        assert torch.equal(restored(keys, dtype), rising)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_more_extreme_than_anything(dtype: torch.dtype) -> None:
    value = torch.tensor([NAN, -NAN, INF, -INF], dtype=dtype)
    for op, pick in (("max", torch.maximum), ("min", torch.minimum)):
        keys = sortable(value, op)
        for other in keys[2:]:
            assert restored(pick(keys[:2], other), dtype).isnan().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_integers_stay(dtype: torch.dtype) -> None:
    value = torch.tensor([0, 1, 1], dtype=dtype)
    assert restored(sortable(value, "max"), dtype).equal(value)
    assert sortable(value, "min").dtype == dtype


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    """Tests that follow in this process begin in float32."""
    yield
    torch.set_default_dtype(torch.float32)


class Extremes(nn.Module):
    """A symmetric contrastive loss, extrema over the batch with their positions, one of them of a nan."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        logits = self.fc(x) @ y.t()
        labels = torch.arange(x.shape[0])
        loss = F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)
        top, at = self.fc(x).max(0)
        loss = loss + top.sum() + self.fc(y).amin(0).sum()
        return loss, at, (x - y).argmin(0), (x / y).amax(0), (y > 0).any(0)


def _run(split: list[int], backend: str) -> list[Tensor]:
    rank = dist.get_rank() if dist.is_initialized() else None
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, x, y = Extremes(), torch.randn(sum(split), 4), torch.randn(sum(split), 4)
    x[-1, 0] = y[-1, 0] = 0.0  # 0 / 0 on the last rank
    if rank is not None:
        x, y = x.split(split)[rank], y.split(split)[rank]
    step = model if rank is None else fxdp.compile(model, backend=backend)
    with no_fallback():
        loss, *others = step(x, y)
        loss.backward()
    assert model.fc.weight.grad is not None
    return [loss.detach(), *others, model.fc.weight.grad]


def test_extrema_over_real_ranks(ranks: RankPool) -> None:
    split = [3, 2]
    expected = _run(split, "")
    assert expected[3][0].isnan()
    for found in ranks.run(len(split), _run, split, "inductor"):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)
