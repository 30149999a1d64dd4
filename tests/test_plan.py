"""Plans without a process group."""

from __future__ import annotations

import torch
from torch import nn

import fxdp


def test_plan_of_many_ranks() -> None:
    """Sixty-four ranks in one process: the gradients' bytes are the parameters', the loss is one scalar."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    plan = fxdp.plan(
        model, (torch.randn(5, 4),), {"target": torch.randint(3, (5,))}, {"dp": 64},
        loss_fn=nn.functional.cross_entropy,
    )  # fmt: skip
    assert plan.gradient_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert [row.bytes for row in plan.communication if not row.gradient] == [8]  # the loss
    assert [row.bytes for row in plan.causes if not row.gradient] == [4, 4]  # its sum and its count
    assert {row.cause for row in plan.causes if row.gradient} == {
        f"gradient of {name}" for name, _ in model.named_parameters()
    }
    assert plan.nodes > 0
    assert "{dp=P(sum)}" in plan.text


def test_plan_of_one_rank_has_no_communication() -> None:
    plan = fxdp.plan(nn.Linear(2, 2), (torch.randn(3, 2),), mesh={"dp": 1})
    assert plan.communication == ()
