"""The predicted cost of blocks, beside measurements."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from benchmarks.harness.models import CASES
from benchmarks.speed.bitwise import SAMPLES
from fxdp.compiler.block_costs import block_times
from tests.capturing import capture


class Attention(nn.Module):
    """Four linear layers of 256 around attention, and two that are wider, as in a layer of GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.qkv, self.out = nn.LayerNorm(256), nn.Linear(256, 768), nn.Linear(256, 256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (4, 64)).transpose(1, 2) for t in self.qkv(self.before(x)).split(256, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def _narrow() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(256, 256), nn.ReLU())))


def _square(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target)


@pytest.mark.parametrize(
    ("model", "shape", "measured"),
    [
        (_narrow(), (64, 256), {1: 15.2, 2: 9.3, 4: 5.2, 8: 3.1, 16: 2.0, 32: 1.7}),
        (nn.Sequential(Attention(), Attention()), (8, 128, 256), {1: 1.08, 2: 0.98, 4: 1.03}),
    ],
    ids=["narrow layers", "attention"],
)
def test_predictions_are_near_to_measurements(
    model: nn.Module, shape: tuple[int, ...], measured: dict[int, float]
) -> None:
    """As measured on one core of a CPU: medians of 25 (narrow layers), by CPU time."""
    batch = torch.randn(shape)
    graph = capture(model, (batch,), {"target": batch}, loss_fn=_square).gm.graph
    times = block_times(graph, "cpu", len(batch), [*measured])
    assert times == sorted(times, reverse=True)
    for time, known in zip(times, measured.values(), strict=True):
        assert 0.6 * known < time < 1.6 * known


def test_the_plan_tells_the_cost_of_blocks_and_proposes_one() -> None:
    batch = torch.randn(64, 256)
    options = {"loss_fn": _square, "backend": "eager"}
    plan = fxdp.plan(_narrow(), (batch,), {"target": batch}, {"dp": 2}, numerics={"block": 16}, **options)
    told, proposed = plan.choice
    assert told.startswith("predicted time of 64 samples by those in a block, over that without blocks: 1: ")
    assert proposed == "proposed: fxdp.Bitwise(block=64), the smallest block that takes at most 1.15"
    assert proposed in str(plan.summary(200))
    assert fxdp.plan(_narrow(), (batch,), {"target": batch}, {"dp": 2}, **options).choice == ()


def test_a_block_that_waits_for_others_at_each_layer_is_larger() -> None:
    """As `benchmarks.speed.bitwise` measures: 2.22, 1.42, 1.20, 1.09 and 1.00."""
    case = CASES["resnet"]
    batch = case.batch(0, SAMPLES["resnet"] // case.local_batch)
    plan = fxdp.plan(case.model(torch.device("cpu")), batch, mesh={"dp": 1}, numerics={"block": 1})
    told, proposed = plan.choice
    times = [float(time) for time in re.findall(r": (\d\.\d\d)", told)]
    assert times == pytest.approx([2.22, 1.42, 1.20, 1.09, 1.00], rel=0.2)
    assert proposed.startswith("proposed: fxdp.Bitwise(block=8), ")
