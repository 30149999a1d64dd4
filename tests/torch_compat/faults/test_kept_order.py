"""Programs whose kernels Inductor would run in another order than they can be."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import fxdp
from tests.fallbacks import no_fallback


class _Rest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + x  # type: ignore[no-any-return]


def _enlarging() -> nn.Module:
    """What DPT and its kin end with."""
    twice = [nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True) for _ in range(2)]
    return nn.Sequential(
        _Rest(), twice[0], nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3, padding=1), twice[1],
        nn.Conv2d(4, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 1, 1), nn.ReLU(),
    )  # fmt: skip


def test_gradients_of_images_that_are_enlarged_twice() -> None:
    torch.manual_seed(0)
    model = _Loss(_enlarging()).double()
    twin, images = copy.deepcopy(model), torch.randn(4, 8, 8, 8, dtype=torch.float64)
    compiled = fxdp.compile(model, backend="inductor")
    with no_fallback():
        compiled(images).backward()
    twin(images).backward()
    for (name, expected), found in zip(twin.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-14, msg=name)


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).squeeze(1).square().mean()  # type: ignore[no-any-return]
