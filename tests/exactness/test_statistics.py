"""Normalization: BatchNorm sees the global batch; the others need no traffic."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxdp
from fxdp.compiler.program import Program
from tests.exactness.cases import D, Model, exact, linear, rows, traffic
from tests.rank_pool import RankPool

BATCH_NORMS = {
    "1d": (lambda: nn.BatchNorm1d(D), (D,)),
    "1d_sequence": (lambda: nn.BatchNorm1d(D), (D, D)),
    "2d": (lambda: nn.BatchNorm2d(D), (D, 3, 3)),
    "3d": (lambda: nn.BatchNorm3d(D), (D, 2, 2, 2)),
    "momentum_none": (lambda: nn.BatchNorm2d(D, momentum=None), (D, 3, 3)),
    "not_affine": (lambda: nn.BatchNorm1d(D, affine=False), (D,)),
    "no_running_stats": (lambda: nn.BatchNorm1d(D, track_running_stats=False), (D,)),
    "sync": (lambda: nn.SyncBatchNorm(D), (D, 3, 3)),
}


def _float_traffic(local: Program) -> tuple[float, float]:
    """Floats per channel that travel forward and backward."""
    found = traffic(local)
    return tuple(sum(r.bytes for r in found if r.phase == p) / 8 / D for p in ("forward", "backward"))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", BATCH_NORMS)
def test_batch_norm_in_training(kind: str) -> None:
    """Outputs, gradients, running statistics; three floats per channel forward, in one, two backward."""
    build, shape = BATCH_NORMS[kind]
    splits = ((4, 3), (3, 3), (5, 2, 0, 1), (3, 3, 2, 2), (1, 1, 1, 1))
    x = rows(*shape).requires_grad_()
    local = exact(Model(lambda bn, x: bn(x * 1.5), build()), x, splits=splits)
    forward, backward = _float_traffic(local)
    assert forward == 3
    assert backward <= 2
    assert [r.phase for r in traffic(local)].count("forward") == 1


def _running_statistics(backend: str, splits: list[list[int]]) -> list[list[list[float]]]:
    """The buffers of this rank, to the last bit, after a step of each split; they are eager's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
    twin = copy.deepcopy(model)
    # what is computed again in the backward is no collective
    budget = 0.0 if backend == "inductor" else 1.0
    compiled = fxdp.compile(model, backend=backend, activation_checkpointing=budget)
    found = []
    for split in splits:
        full = torch.randn(sum(split), 2, 5, 5) * 3 + 10
        twin(full)
        compiled(full.split(split)[dist.get_rank()])
        for buffer, wanted in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(buffer, wanted)
        found.append([b.double().tolist() for b in model.buffers()])
    return found


@pytest.mark.parametrize(
    ("backend", "splits"),
    [("eager", [[5, 2, 0, 1], [1, 1, 1, 1], [0, 0, 3, 0]]), ("inductor", [[4, 1], [0, 3]])],
)
def test_running_statistics_are_the_same_on_all_ranks(
    ranks: RankPool, backend: str, splits: list[list[int]]
) -> None:
    """Bit for bit, also where the ranks' code differs because their batches do."""
    found = ranks.run(len(splits[0]), _running_statistics, backend, splits)
    assert all(other == found[0] for other in found)


def test_batch_norm_in_evaluation() -> None:
    model = Model(lambda fc, bn, x: bn(fc(x)), linear(), nn.BatchNorm1d(D)).eval()
    assert traffic(exact(model, rows())) == []


def test_frozen_batch_norm_inside_training() -> None:
    model = Model(lambda fc, bn, x: bn(fc(x)).relu(), linear(), nn.BatchNorm1d(D))
    model.layers[1].eval().requires_grad_(False)
    assert traffic(exact(model, rows())) == []


def test_two_batch_norms_and_a_block() -> None:
    def body(conv: nn.Module, a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
        y = a(conv(x)).relu()
        return (b(conv(y)) + x).relu().mean((2, 3))

    model = Model(body, nn.Conv2d(D, D, 3, padding=1), nn.BatchNorm2d(D), nn.BatchNorm2d(D))
    exact(model, rows(D, 3, 3), splits=((4, 3), (5, 2, 0, 1)))


def test_batch_norm_without_affine_at_one_sample_per_rank() -> None:
    exact(Model(lambda bn, x: bn(x), nn.BatchNorm1d(D)), rows(), splits=((1, 1), (0, 1, 1, 0)))


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (lambda: nn.GroupNorm(2, D), (D, 3, 3)),
        (lambda: nn.GroupNorm(D, D), (D, D)),
        (lambda: nn.LayerNorm(D), (D, D)),
        (lambda: nn.LayerNorm((D, D)), (D, D)),
        (lambda: nn.InstanceNorm2d(D, affine=True), (D, 3, 3)),
        (lambda: nn.InstanceNorm1d(D, track_running_stats=False), (D, D)),
        (lambda: nn.RMSNorm(D), (D, D)),
        (lambda: nn.LocalResponseNorm(3), (D, 3, 3)),
    ],
    ids=["group", "group_per_channel", "layer", "layer_2d", "instance", "instance_1d", "rms", "response"],
)
def test_norms_within_a_sample_need_no_traffic(norm, shape: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    model = Model(lambda norm, x: norm(x), norm())
    assert traffic(exact(model, rows(*shape).requires_grad_())) == []


@pytest.mark.parametrize("splits", [((10,),), ((5, 2, 0, 1),)], ids=str)
def test_group_norm_of_channels_last_takes_gradients_that_lie_otherwise(splits: tuple[list[int]]) -> None:
    """Its backward reads the gradient's memory as the input's lies; those of the test are contiguous."""
    model = Model(lambda norm, x: norm(x.to(memory_format=torch.channels_last) * x.exp()), nn.GroupNorm(2, D))
    exact(model, rows(D, 3, 3).requires_grad_(), splits=splits)


def test_instance_norm_with_running_statistics() -> None:
    exact(
        Model(lambda norm, x: norm(x), nn.InstanceNorm2d(D, affine=True, track_running_stats=True)),
        rows(D, 3, 3),
    )


def test_weight_and_spectral_norm() -> None:
    def body(a: nn.Module, x: Tensor) -> Tensor:
        return a(x).tanh()

    exact(Model(body, nn.utils.parametrizations.weight_norm(linear())), rows())
    exact(Model(body, nn.utils.parametrizations.spectral_norm(linear())), rows())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_buffer_is_written_that_nobody_reads(backend: str) -> None:
    """Spectral norm makes `u` anew from the weight and `v`."""
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    twin = copy.deepcopy(model)
    compiled, x = fxdp.compile(model, backend=backend), torch.randn(5, 4)
    torch.testing.assert_close(compiled(x), twin(x))
    for mine, one in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, one)


def test_statistics_kept_in_buffers_by_hand() -> None:
    """An exponential average of the batch mean, and a counter."""

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = linear()
            self.register_buffer("mean", torch.zeros(D))
            self.register_buffer("seen", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * y.mean(0))
                self.seen += len(x)
            return y - self.mean

    exact(Centered(), rows())
