"""A call like the one before costs few Python calls of ours: counted, not timed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxdp
from tests.rank_pool import RankPool

ROOM = str(Path(fxdp.__file__).parent)
MOST = 60
"""Python calls of functions of fxdp in one call of a compiled module, of any number of layers."""


class Net(nn.Module):
    """A model of the user's own code, which reads attributes, a global, a function's default and a list."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])
        self.scale, self.sizes = 0.5, [1, 2]

    def forward(self, x: Tensor, power: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x)) * self.scale + self.sizes[1] * MOST * power
        return x


def _counted(call: Callable[[], Any]) -> Counter[str]:
    """How often each function of fxdp is called, by file and name."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOM):
            file = Path(frame.f_code.co_filename).relative_to(ROOM)
            found[f"{file} {frame.f_code.co_qualname}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def _calls(model: nn.Module, loss_fn: Any = None) -> Counter[str]:
    compiled = fxdp.compile(model, backend="eager", loss_fn=loss_fn)
    x = torch.randn(4 + torch.distributed.is_initialized(), 8)
    named = {} if loss_fn is None else {"target": torch.randn(x.shape)}
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.01)
    for _ in range(4):  # the fifth call compares no replicas
        compiled(x, **named).sum().backward()
        optimizer.step()
    return _counted(lambda: compiled(x, **named))


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), None),
    "loss_fn": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), F.mse_loss),
    "own code": (lambda: Net(2), None),
    "many layers": (lambda: Net(12), F.mse_loss),
}


@pytest.mark.parametrize("name", MODELS)
def test_on_one_rank(name: str) -> None:
    build, loss_fn = MODELS[name]
    calls = _calls(build(), loss_fn)
    assert calls["module/compiled.py CompiledModule.forward"] == 1
    assert sum(calls.values()) <= MOST, calls


def _on_ranks(name: str) -> Counter[str]:
    build, loss_fn = MODELS[name]
    return _calls(build(), loss_fn)


def test_on_two_ranks_what_sends_and_waits_comes_on_top(ranks: RankPool) -> None:
    for calls in ranks.run(2, _on_ranks, "own code"):
        own = {name: count for name, count in calls.items() if not name.startswith(("ranks/", "transport/"))}
        assert own["module/compiled.py CompiledModule.forward"] == 1
        assert sum(own.values()) <= MOST, own
