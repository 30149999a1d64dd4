"""Values that lie otherwise on a rank with one sample, or none, than in the batch that was captured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxdp
from tests.exactness.cases import D, Model, exact, in_fours, linear, rows

SPLITS = ((3, 1), (2, 0, 1), (1, 1))


def turned(x: Tensor) -> Tensor:
    """Rows of planes that lie as channels, beside planes that lie as planes: with one sample, as neither."""
    return x.flatten(2).transpose(1, 2).sin().transpose(1, 2).reshape(x.shape) + x


class Turned(nn.Module):
    """A linear layer over the channels of a plane, and a norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.fc, self.norm = linear(), norm

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape) + x
        return self.norm(y).square().mean()


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.GroupNorm(2, D),
        lambda: nn.GroupNorm(D, D),
        lambda: nn.BatchNorm2d(D),
        lambda: nn.InstanceNorm2d(D, affine=True),
    ],
    ids=["group", "group_per_channel", "batch", "instance"],
)
def test_norms_of_planes(norm: Callable[[], nn.Module]) -> None:
    exact(Turned(norm()), rows(D, 3, 5).requires_grad_(), splits=SPLITS)


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(x, 2),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, 2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x.cos(), x.transpose(1, 2).reshape(x.shape)),
    "attention_of_turned_rows": lambda x: F.scaled_dot_product_attention(x.mT, x.cos().mT, x.mT),
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "complex": lambda x: torch.view_as_complex(x[..., :4].unflatten(-1, (2, 2))).abs(),
    "conv": lambda x: F.conv2d(x, torch.ones(4, x.shape[1], 2, 2)),
    "fold": lambda x: F.fold(F.unfold(x, 2), x.shape[-2:], 2),
    "grid_sample": lambda x: F.grid_sample(x, x[:, :2].movedim(1, -1).tanh(), align_corners=False),
    "layer_norm": lambda x: F.layer_norm(x.movedim(1, -1), x.shape[1:2]),
    "log_softmax": lambda x: F.nll_loss(x.log_softmax(1), x[:, 0].gt(0).long(), reduction="none"),
    "max_pool": lambda x: F.max_pool2d(x, 2),
    "nearest": lambda x: F.interpolate(x, size=4),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x[..., :2], 2),
    "unflattened": lambda x: x.movedim(1, -1).unflatten(-1, (2, -1)).flatten(1, 2),
}


@pytest.mark.parametrize("kinds", in_fours(OPS), ids=" ".join)
def test_ops_of_planes(kinds: tuple[str, ...]) -> None:
    def body(fc: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        y = turned(fc(x.mT).mT.contiguous())
        return tuple(OPS[kind](y) for kind in kinds)

    exact(Model(body, nn.Linear(4, 4)), torch.randn(7, 8, 4, 4, requires_grad=True), splits=SPLITS)


def test_ops_of_planes_in_channels_last() -> None:
    def body(fc: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        y = fc(x).to(memory_format=torch.channels_last) * x.exp()
        return tuple(OPS[kind](y) for kind in ("max_pool", "attention", "layer_norm", "conv"))

    exact(Model(body, nn.Linear(4, 4)), torch.randn(7, 8, 4, 4, requires_grad=True), splits=SPLITS)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_one_sample_after_a_larger_batch(backend: str) -> None:
    model = Turned(nn.GroupNorm(2, D))
    compiled = fxdp.compile(model, backend=backend)
    for batch in (4, 1):
        x = torch.randn(batch, D, 3, 5)
        results = []
        for run in (compiled, model):
            loss = run(x)
            results.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
