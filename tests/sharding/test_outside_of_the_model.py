"""Sharded parameters outside of the compiled module: one rank alone, parametrizations, attributes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, spectral_norm

import fxdp
from fxdp.ranks.liveness.failure import broadcast_all
from tests.rank_pool import RankPool

_X = torch.arange(24.0, dtype=torch.float64).view(8, 3).sin()
_Y = torch.arange(40.0, dtype=torch.float64).view(8, 5).cos()


def _net(new: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layer = nn.Linear(3, 5).double()
    return nn.Sequential((parametrizations.spectral_norm if new else spectral_norm)(layer), nn.Tanh())


def _alone(new: bool) -> tuple[list[Tensor], str]:
    """Rank 0 evaluates by itself, as the words for the error say, and reads the weight."""
    net, one = _net(new), _net(new)
    compiled = fxdp.compile(net, strategy="shard", loss_fn=nn.functional.mse_loss, backend="eager")
    own = slice(0, 5) if dist.get_rank() == 0 else slice(5, 8)
    compiled(_X[own], target=_Y[own]).backward()
    nn.functional.mse_loss(one(_X), _Y).backward()
    compiled.eval()
    one.eval()
    said = ""
    try:
        net(_X)
    except RuntimeError as error:
        said = str(error)
    layer: Any = net[0].parametrizations.weight if new else net[0]
    full = {name: p.full_tensor() for name, p in net.named_parameters()}  # type: ignore[operator]
    parts = {name: p.full_tensor() for name, p in layer.named_parameters()}
    found = []
    if dist.get_rank() == 0:
        found += [functional_call(net, full, _X), one(_X)]
        if new:
            found += [functional_call(layer, parts, ()), one[0].weight]
    return [each.detach() for each in found], said


def _both() -> list[Any]:
    return [_alone(new) for new in (True, False)]


def test_rank_0_goes_on_alone_with_full_values(ranks: RankPool) -> None:
    first, second = ranks.run(2, _both)
    for found, said in (*first, *second):
        torch.testing.assert_close(found[::2], found[1::2], rtol=1e-12, atol=1e-12)
        error = RuntimeError(said)
        broadcast_all(error)  # as the hook for errors that end the process does
        assert "torch.func.functional_call(layer, full, x)" in "".join(error.__notes__)
    assert [len(found) for found, _ in first] == [4, 2]


class _Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(()))
        self.weight.decays = self.scale.decays = True  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.scale


def _kept() -> list[bool]:
    """An attribute that a script sets on parameters, for its groups of weight decay."""
    found = []
    for strategy, device in (("shard", "cpu"), ("shard", "meta"), ("optimizer", "cpu")):
        with torch.device(device):
            net = _Marked()
        held = list(net.parameters())
        compiled = fxdp.compile(net, strategy=strategy, backend="eager")
        compiled(torch.ones(2, 3)).sum().backward()
        found += [getattr(p, "decays", False) for p in (*held, *compiled.parameters())]
    return found


def test_attributes_of_parameters_stay(ranks: RankPool) -> None:
    assert ranks.run(2, _kept) == [[True] * 12] * 2
