"""`torch.compile(model, backend="fxdp")` without `fullgraph=True`: graph breaks change no number."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fxdp.dynamo.backend import backend
from fxdp.errors import InputError
from tests.rank_pool import RankPool


class Broken(nn.Module):
    """Python between graphs reads a parameter, means over the batch, and values that decide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor | None = None, *, twice: bool = False) -> Tensor:
        h = self.norm(self.first(x))
        torch._dynamo.graph_break()
        h = h - h.square().mean(0) * self.scale
        while h.norm() > 1:
            h = h / 2
        parts = [self.last(h) for _ in range(2 if twice else 1)]
        return sum(parts) if y is None else F.cross_entropy(sum(parts), y)  # type: ignore[arg-type,return-value]


def _compiled(model: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, options={"backend": "eager"})


def _steps(compiles: bool) -> list[float]:
    model = Broken().double()
    compiled = _compiled(model) if compiles else model
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    shown = []
    for step, total in enumerate((5, 5, 7)):
        x = torch.randn(total, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        y = torch.arange(total) % 2
        mine = slice(None) if dist.get_world_size() == 1 else (slice(0, 3), slice(3, None))[dist.get_rank()]
        loss = compiled(x[mine], y[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown.append(loss.item())
    with torch.no_grad():
        rows = compiled.eval()(x[mine], twice=True)
    total_rows = rows.sum(0)
    dist.all_reduce(total_rows)
    return [*shown, *total_rows.tolist(), *(p.sum().item() for p in model.parameters())]


def test_it_trains_as_one_device(ranks: RankPool) -> None:
    (expected,) = ranks.run(1, _steps, False)
    for found in ranks.run(2, _steps, True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_later_calls_and_copies_of_the_model() -> None:
    model = Broken()
    compiled = _compiled(model)
    x, y = torch.randn(5, 4), torch.arange(5) % 2
    losses = [compiled(x, y) for _ in range(2)]
    other = copy.deepcopy(compiled)
    assert type(other._orig_mod) is Broken
    with torch.no_grad():
        other._orig_mod.last.bias.add_(torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(other(x, y), other._orig_mod(x, y))
    torch.testing.assert_close(losses, [model(x, y)] * 2)


def test_a_file_of_the_model_does_not_need_fxdp(tmp_path: Path) -> None:
    model = Broken()
    _compiled(model)(torch.randn(5, 4)).sum().backward()
    torch.save(model, tmp_path / "model.pt")
    assert b"fxdp." not in (tmp_path / "model.pt").read_bytes()
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    expected, found = model.eval()(torch.ones(2, 4)), loaded.eval()(torch.ones(2, 4))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(_compiled(loaded)(torch.ones(2, 4)), expected)


def test_a_forward_with_hooks_is_refused() -> None:
    model = Broken()
    model.register_forward_pre_hook(lambda module, inputs: None)
    with pytest.raises(InputError, match=r"(?s)expected fullgraph=True.*graph 1 of"):
        _compiled(model)(torch.randn(5, 4))
