"""`activation_checkpointing=[...]`: the same bits from less memory; nothing is drawn or summed twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from tests.fallbacks import no_fallback
from tests.held_memory import peak_of


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.drop(F.gelu(self.wide(self.norm(x)))))


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _trained(backend: str, names: list[str]) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model, x = _Blocks().double(), torch.randn(32, 16, dtype=torch.float64)
    with no_fallback():
        compiled = fxdp.compile(model, backend=backend, activation_checkpointing=names)
        for _ in range(2):
            compiled(x).backward()
    values = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [*values, *(b.double() for b in model.buffers())], peak_of(lambda: compiled(x).backward())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_same_numbers_from_less_memory(backend: str) -> None:
    (values, most), (again, less) = (_trained(backend, names) for names in ([], ["layers.*"]))
    assert len(values) == len(again) > 12
    assert all(torch.equal(a, b) for a, b in zip(values, again, strict=True))
    assert less < 0.85 * most


def test_nothing_travels_twice() -> None:
    x = (torch.randn(1536, 16),)
    plain, again = (
        fxdp.plan(_Blocks(), x, mesh={"dp": 3}, activation_checkpointing=names)
        for names in ([], ["layers.?"])
    )
    assert again.communication == plain.communication
    assert again.memory()[0].at_peak["saved"] < plain.memory()[0].at_peak["saved"]
    assert fxdp.verify(_Blocks(), (x[0][:12],), mesh={"dp": 3}, activation_checkpointing=["layers.1"]).ok
