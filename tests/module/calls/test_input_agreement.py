"""Ranks whose batches do not belong together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxdp
from tests.rank_pool import RankPool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return (self.last(self.first(x)) * scale).square().mean()


def _x(seed: int, size: int = 4) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


def _error(action: Callable[[], Any]) -> str:
    try:
        action()
    except fxdp.InputError as error:
        return str(error)
    return "no error"


def _inputs() -> dict[str, Any]:
    rank = dist.get_rank()
    scale = torch.ones(())
    pipeline = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    staged = fxdp.compile(Net(), pipeline, backend="eager")
    compiled = fxdp.compile(Net(), backend="eager")
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fxdp").addHandler(handler)
    found: dict[str, Any] = {
        "pipeline": _error(lambda: staged(_x(rank), scale)),
        "afterwards": _error(lambda: staged(_x(0), scale)),
        "shared": _error(lambda: compiled(_x(rank), scale + rank)),
        "parts": _error(lambda: compiled(_x(rank), scale)),
        "warned": list(records),
    }
    fxdp.compile(Net(), backend="eager")(_x(0), scale)
    found["copies"] = records
    logging.getLogger("fxdp").removeHandler(handler)
    return found


def test_batches_that_do_not_belong_together(ranks: RankPool) -> None:
    first, second = ranks.run(2, _inputs)
    for found in (first, second):
        assert "rank 1 of the mesh passes other samples than rank 0" in found["pipeline"]
        assert "scale of the inputs has no batch dim, but its values differ" in found["shared"]
        assert found["afterwards"] == found["parts"] == "no error"
        assert not found["warned"]
    assert ["all 2 ranks passed the same samples" in text for text in first["copies"]] == [True]
    assert not second["copies"]
