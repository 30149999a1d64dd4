"""Which models are refused before anything else, with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fxdp
from tests.rank_pool import RankPool

WAYS: list[Callable[[Any], Any]] = [
    fxdp.compile,
    lambda model: fxdp.plan(model, (torch.zeros(2, 2),)),
    lambda model: fxdp.verify(model, (torch.zeros(2, 2),)),
]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = fxdp.compile(nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


@pytest.mark.parametrize("way", WAYS, ids=["compile", "plan", "verify"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: torch.sin, "a builtin_function_or_method, expected a torch.nn.Module"),
        (lambda: fxdp.compile(nn.Linear(2, 2)), "the model is compiled by fxdp already"),
        (Outer, "its part 'net' is compiled by fxdp already"),
        (lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 2))), "its part '0' is a DataParallel"),
    ],
)
def test_no_plain_module(way: Callable[[Any], Any], model: Callable[[], Any], words: str) -> None:
    with pytest.raises(fxdp.InputError, match=words):
        way(model())


def _wrapped() -> list[str]:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    sharded = fully_shard(nn.Linear(4, 4), mesh=mesh)
    layer = nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=mesh))
    found = []
    for model in (DistributedDataParallel(nn.Linear(4, 4)), sharded, layer):
        try:
            fxdp.compile(model)
        except fxdp.InputError as error:
            found.append(str(error))
    return found


def test_models_that_communicate_by_themselves(ranks: RankPool) -> None:
    for ddp, sharded, layer in ranks.run(2, _wrapped):
        assert "a DistributedDataParallel, which reduces gradients itself; expected what is inside" in ddp
        for text in (sharded, layer):
            assert "FSDPLinear" in text or "DTensors (weight, bias, ...)" in text


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"pp": 2}])
def test_a_mesh_of_sizes_cannot_run(sizes: dict[str, int]) -> None:
    with pytest.raises(fxdp.MeshError, match=r"has sizes but no ranks.*init_device_mesh"):
        fxdp.compile(nn.Linear(2, 2), sizes, loss_fn=nn.MSELoss())  # type: ignore[arg-type]
