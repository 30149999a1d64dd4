"""Ranks whose code goes through a set in other orders have the same program all the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxdp
from fxdp.errors import AgreementError
from fxdp.ir.tensor_difference import difference
from tests.capture.joint.test_one_order import ORDERS, Kinds
from tests.exactness.models import part
from tests.rank_pool import RankPool


def _train(options: dict[str, Any], drop: float) -> float | str:
    """The worst error of losses, parameters and buffers in three steps; or the ranks' refusal."""
    torch.set_default_dtype(torch.float64)
    rank = dist.get_rank()
    torch.manual_seed(0)
    twin = Kinds(ORDERS[0], drop)
    model = Kinds(ORDERS[rank], drop)
    model.load_state_dict(copy.deepcopy(twin.state_dict()))
    axis = "dp_shard" if options.get("strategy") else "dp"
    compiled = fxdp.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)), **options)
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-2) for net in (compiled, twin)]
    errors = []
    for split in ([3, 3], [4, 1], [1, 5]):
        full = torch.randn(sum(split), 4), torch.randn(sum(split), 4)
        try:
            loss = compiled(*(part(t, split, rank) for t in full))
        except AgreementError as error:
            return str(error)
        expected = twin(*full)
        for value, optimizer in ((loss, optimizers[0]), (expected, optimizers[1])):
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        errors.append(difference(loss.detach(), expected.detach()))
    states = compiled.state_dict(), twin.state_dict()
    for name, value in states[1].items():
        own = states[0][name]
        errors.append(difference(own.full_tensor() if isinstance(own, DTensor) else own, value))
    return max(errors)


@pytest.mark.parametrize("options", [{}, {"strategy": "shard", "backend": "eager"}])
def test_ranks_of_other_orders_equal_one_device(ranks: RankPool, options: dict[str, Any]) -> None:
    """Parameters' and buffers' values are rank 0's by their names."""
    for worst in ranks.run(2, _train, options, 0.0):
        assert worst < 1e-12


def test_orders_that_make_other_draws_are_refused(ranks: RankPool) -> None:
    for said in ranks.run(2, _train, {"backend": "eager", "rng": "single-device"}, 0.5):
        assert "ranks were given different models" in said
