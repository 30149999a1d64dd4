"""A fault, what happens to which rank and where, and the model that the ranks train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

AT_TRACE: list[Callable[[], None]] = []
"""What happens inside of the model."""


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, and where.

    Attributes
    ----------
    mode : dp, dp3 (three ranks), pp, shard; inductor and pp-inductor: dp and pp, compiled.
    after : at any moment: seconds of training before it.
    launched : whether torchrun starts the ranks, as processes that import all by themselves.
    """

    kind: str
    phase: str
    mode: str
    victim: int
    after: float = 0.0
    launched: bool = False

    @property
    def ranks(self) -> int:
        return 3 if self.mode == "dp3" else 2

    @property
    def is_waited_for(self) -> bool:
        """Whether only time tells: the rank hangs, or ends without an error before it has met the others."""
        return self.kind == "hang" or (self.kind == "error in a thread" and self.phase == "start-up")

    @property
    def stages(self) -> bool:
        return self.mode.startswith("pp")

    @property
    def compiled(self) -> bool:
        return self.mode.endswith("inductor")


class Net(nn.Module):
    def __init__(self, stages: bool, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 3)
        self.norm = nn.LayerNorm(width) if stages else nn.BatchNorm1d(width)  # a sum in each forward
        self.stages = stages

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for strike in AT_TRACE:
            strike()
        if not self.stages:
            assert torch.isfinite(x).all(), "a bad sample"
        return F.cross_entropy(self.last(F.relu(self.norm(self.first(x)))), y)
