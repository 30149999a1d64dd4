"""What a plan says a rank holds is what it holds, counted at torch's allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxdp
from tests.held_memory import bytes_of, peak_of, shared_bytes
from tests.rank_pool import RankPool


def _images() -> nn.Module:
    # 16 channels: oneDNN's kernels pad fewer ones, in memory of their own
    blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 16, 3), *blocks, nn.Flatten(), nn.Linear(16 * 14 * 14, 10))


def _rows() -> nn.Module:
    overlapped = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*overlapped, nn.Linear(64, 10))


def _case(name: str) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    torch.manual_seed(0)
    options = {"loss_fn": nn.functional.cross_entropy}
    made, x = (_rows(), torch.randn(16, 64)) if name == "mlp" else (_images(), torch.randn(8, 3, 16, 16))
    return made, (x, torch.randint(10, (len(x),))), options


def _predicted_and_counted(name: str, strategy: str) -> tuple[int, int, dict[str, int]]:
    model, (x, y), options = _case(name)
    x += dist.get_rank()
    # small buckets, so that several are under way
    compiled = fxdp.compile(
        model, backend="eager", strategy=strategy, communication={"bucket_cap_mb": 1 / 64}, **options
    )
    optimizer = torch.optim.AdamW(compiled.parameters())

    def run() -> None:
        compiled(x, target=y).backward()

    run()
    optimizer.step()
    optimizer.zero_grad()
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    # unsharded parameters that stay are not among these: rows have changed, so the call counts new ones
    still = bytes_of([*compiled.parameters(), *compiled.buffers(), x, y, *kept])
    counted = still + peak_of(run)
    ranks, (memory,) = dist.get_world_size(), compiled.plan.memory()
    # what other tests of these processes have sent stays in their buffers
    return memory.peak.bytes - memory.shared, counted, {
        **memory.at_peak, "shared": min(memory.shared, shared_bytes(ranks))
    }  # fmt: skip


def _all(cases: list[tuple[str, str]]) -> list[tuple[int, int, dict[str, int]]]:
    return [_predicted_and_counted(*case) for case in cases]


def test_the_predicted_peak_is_what_is_counted(ranks: RankPool) -> None:
    cases = [("mlp", "shard"), ("cnn", "replicate"), ("mlp", "optimizer")]
    for found in ranks.run(2, _all, cases):
        for case, (predicted, counted, parts) in zip(cases, found, strict=True):
            assert predicted == pytest.approx(counted, rel=0.1), (case, parts)
            assert sum(parts.values()) - parts["shared"] == predicted
            assert parts[{"shard": "gradients", "replicate": "saved", "optimizer": "full"}[case[1]]] > 0
            assert parts["optimizer"] >= 2 * parts["parameters"]


def test_the_state_of_other_optimizers() -> None:
    model, (x, y), options = _case("mlp")
    plan = fxdp.plan(model, (x,), {"target": y}, mesh={"dp": 2}, **options)
    (adam,), (sgd,) = plan.memory(), plan.memory(state=0)
    size = bytes_of(model.parameters())
    assert (adam.optimizer, sgd.optimizer) == (2 * size, 0)
    assert adam.peak.bytes - sgd.peak.bytes == adam.at_peak["optimizer"] == 2 * size
    assert sum(sgd.at_peak.values()) == sgd.peak.bytes
    assert "optimizer state" not in str(sgd)
    with pytest.raises(fxdp.InputError, match="1 for SGD with momentum"):
        plan.memory(state=-1)
