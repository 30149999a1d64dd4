"""BatchNorm and its relatives: global statistics, running buffers, few sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxdp.ir.graph.metadata import meta
from fxdp.ir.ops.moments import MOMENTS_OP
from fxdp.ir.types.sizes import mentions_batch
from fxdp.ir.types.value_types import TensorType

from .oracle import check


class Net(nn.Module):
    def __init__(self, first: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.first(x)).tanh() ** 2).mean()


def dense(norm: nn.Module) -> Net:
    return Net(nn.Linear(6, 8), norm).double()


def conv(norm: nn.Module) -> Net:
    return Net(nn.Conv2d(2, 8, 3), norm).double()


# made in the test that uses them, whose seed decides the weights: at import the files before would
NORMS: dict[str, tuple[Callable[[], Net], tuple[int, ...]]] = {
    "bn1d": (lambda: dense(nn.BatchNorm1d(8)), (6,)),
    "bn1d_length": (lambda: Net(nn.Conv1d(2, 8, 1), nn.BatchNorm1d(8)).double(), (2, 5)),
    "bn2d": (lambda: conv(nn.BatchNorm2d(8)), (2, 5, 5)),
    "bn_plain": (lambda: dense(nn.BatchNorm1d(8, affine=False)), (6,)),
    "bn_untracked": (lambda: dense(nn.BatchNorm1d(8, track_running_stats=False)), (6,)),
    "bn_cumulative": (lambda: dense(nn.BatchNorm1d(8, momentum=None)), (6,)),
    "sync_bn": (lambda: conv(nn.SyncBatchNorm(8)), (2, 5, 5)),
    "group": (lambda: conv(nn.GroupNorm(2, 8)), (2, 5, 5)),
    "layer": (lambda: dense(nn.LayerNorm(8)), (6,)),
    "instance": (lambda: conv(nn.InstanceNorm2d(8, affine=True)), (2, 5, 5)),
    "rms": (lambda: dense(nn.RMSNorm(8)), (6,)),
}


@pytest.mark.parametrize("name", [name for name in NORMS if name != "sync_bn"])
def test_training(name: str) -> None:
    make, shape = NORMS[name]
    check(make(), (torch.randn(3, *shape),), {}, ((torch.randn(4, *shape),), {}))


@pytest.mark.parametrize("name", ["bn1d", "bn2d", "bn_cumulative", "bn_untracked"])
def test_evaluation_with_gradients(name: str) -> None:
    make, shape = NORMS[name]
    check(make().eval(), (torch.randn(3, *shape),))


def test_sync_batch_norm_is_batch_norm() -> None:
    make, shape = NORMS["sync_bn"]
    x = torch.randn(3, *shape)
    captured = check(conv(nn.BatchNorm2d(8)), (x,))
    from tests.capturing import capture

    synchronised = capture(make(), (x,), {})
    assert [n.name for n in synchronised.gm.graph.nodes] == [n.name for n in captured.gm.graph.nodes]


def test_sample_of_one_with_space() -> None:
    check(conv(nn.BatchNorm2d(8)), (torch.randn(1, 2, 5, 5),))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = conv(nn.BatchNorm2d(8)).to(dtype)
    check(model, (torch.randn(3, 2, 5, 5, dtype=dtype),), tol=3e-2, floor=1e-2)


def test_moments_forward_two_sums_backward() -> None:
    make, shape = NORMS["bn2d"]
    captured = check(make(), (torch.randn(3, *shape),))
    found = []
    for node in captured.gm.graph.nodes:
        if (
            node.target in (torch.ops.aten.sum.dim_IntList, MOMENTS_OP)
            and "norm" in meta(node).location.module
        ):
            source = meta(node.args[0]).type
            assert isinstance(source, TensorType)
            if mentions_batch(source.shape[0]):
                found.append((meta(node).backward, node.target is MOMENTS_OP))
    assert found == [(False, True), (True, False), (True, False)]


def test_sample_norms_stay_whole() -> None:
    for name, op in (("layer", "native_layer_norm"), ("group", "native_group_norm")):
        make, shape = NORMS[name]
        captured = check(make(), (torch.randn(3, *shape),))
        assert any(f"{op}." in str(node.target) for node in captured.gm.graph.nodes)
