from __future__ import annotations

import torch
from torch import Tensor, nn

from fxdp.capture.refusals.twins import twin_of


class Keeps(nn.Module):
    """Keeps what it computed, as hooks that gather features do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.features: dict[str, list[Tensor]] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.fc(x)
        self.features["fc"] = [self.last]
        return self.last.sum()


def test_what_a_forward_left_is_copied_as_values() -> None:
    model = Keeps()
    model(torch.randn(4, 3)).backward()
    twin = twin_of(model)
    assert twin.last is twin.features["fc"][0]
    assert torch.equal(twin.last, model.last)
    assert not twin.last.requires_grad
    assert twin.fc.weight is not model.fc.weight
