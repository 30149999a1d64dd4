"""A profile reads like the plan: stages, micro-batches, and each message by its name and cause."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import fxdp
from fxdp.ir.ops.packed_sums import start_sum
from fxdp.runtime.ranges import ranged
from tests.rank_pool import RankPool

_TORCHS = ("::", "Backward", "gloo", "PythonDispatchMode")


def _profile() -> profile:
    return profile(activities=[ProfilerActivity.CPU], acc_events=True)


def _recorded(compiled: fxdp.CompiledModule, x: Tensor) -> list[str]:
    """The ranges of one step, those of torch's own ops aside."""
    for _ in range(2):  # replicas are compared at the second call
        compiled(x).backward()
    with _profile() as found:
        compiled(x).backward()
    names = [event.name for event in sorted(found.events(), key=lambda e: e.time_range.start)]
    return [name for name in names if not any(word in name for word in _TORCHS)]


class Net(nn.Module):
    """BatchNorm exchanges in the midst of both halves, gradients at the end."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4) if norm else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x))).square().mean()


def _profiles() -> tuple[list[str], list[str], list[str], list[str]]:
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    full = fxdp.compile(Net(norm=True), backend="eager")
    first = _recorded(full, x)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    staged = fxdp.compile(Net(norm=False), mesh, backend="eager", pipeline={"microbatches": 2})
    second = _recorded(staged, x)
    assert dist.group.WORLD is not None
    group, value = dist.group.WORLD.group_name, torch.ones(2)
    c10d = torch.ops._c10d_functional
    with _profile() as found, ranged("forward", [("all_reduce", "a: of b")]):
        # as Inductor writes them: into the operand; the second is none that the plan knows
        c10d.wait_tensor(c10d.all_reduce_(value, "sum", group))
        c10d.wait_tensor(c10d.all_reduce_(value, "sum", group))
    with _profile() as packed, ranged("forward", [("all_reduce", "a: of b")]):
        c10d.wait_tensor(start_sum([value, value], group))
    found.events().extend(packed.events())
    third = [event.name for event in found.events() if not any(word in event.name for word in _TORCHS)]
    return first, [row.key for row in full.plan.collectives()], second, third


def test_ranges_are_named_as_the_plan_names_what_runs(ranks: RankPool) -> None:
    (full, keys, first, by_hand), (_, _, second, _) = ranks.run(2, _profiles)
    started = [name.partition(":")[0] for name in full if name.startswith("all_reduce")]
    assert started == keys
    assert full[0] == "forward"
    assert "backward" in full
    assert f"{keys[-1]}: 4 gradients: gradient of second.bias to first.weight" in full
    assert [name for name in full if name.startswith("wait for")] == [f"wait for {key}" for key in keys]
    assert {"forward_0_mb0", "forward_0_mb1", "backward_0_mb1"} <= set(first)
    assert {"forward_1_mb0", "input_gradient_1_mb1", "weight_gradient_1_mb1"} <= set(second)
    assert any(name.startswith("send_") and name.endswith("mb1_to1") for name in first)
    assert by_hand == [
        "forward", "a: of b", "wait for a", "all_reduce_", "wait for all_reduce_",
        "forward", "a: of b", "wait for a",
    ]  # fmt: skip


def test_nothing_is_recorded_for_nobody() -> None:
    assert type(ranged("forward", ())).__name__ == "nullcontext"
