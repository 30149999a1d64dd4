"""Clipping and optimizers on sharded parameters with the bits of one device, or a refusal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.clip_grad import _get_total_norm

import fxdp
from fxdp.torch_compat import dtensor_ops
from tests.rank_pool import RankPool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(7, 2003), nn.Linear(2003, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x))).square().mean()


def _clipped(numerics: object) -> list[str]:
    """The kinds of norm whose bits are not those of full gradients, and what a fused step says."""
    torch.manual_seed(0)
    dtensor_ops._OF_FULL_NORMS.clear()  # of other tests on these ranks, whose mesh is equal
    compiled = fxdp.compile(Net(), strategy="shard", numerics=numerics, backend="eager")
    compiled(torch.randn(2, 7)).backward()
    gradients = [p.grad for p in compiled.parameters()]
    full = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    assert any(isinstance(g, DTensor) for g in gradients)
    found = []
    for kind in (2.0, 1.0, 3.0, 0.5, float("inf")):
        for foreach in (True, False):
            expected = _get_total_norm(full, kind, foreach=foreach)  # type: ignore[arg-type]
            got = clip_grad_norm_(compiled.parameters(), 1e9, kind, foreach=foreach)
            if not torch.equal(got.full_tensor() if isinstance(got, DTensor) else got, expected):
                found.append(f"{kind} {foreach}")
    if numerics is not None:
        optimizer = torch.optim.AdamW(compiled.parameters(), fused=True)
        with pytest.raises(fxdp.InputError, match=r"AdamW\(fused=True\) on sharded .* expected foreach=True"):
            optimizer.step()
        torch.optim.AdamW(compiled.parameters(), foreach=True).step()
    return found


def test_norms_of_shards_have_the_bits_of_full_gradients(ranks: RankPool) -> None:
    assert ranks.run(3, _clipped, None)[0]  # or the next line would show nothing
    assert ranks.run(3, _clipped, fxdp.Bitwise(block=1)) == [[]] * 3
