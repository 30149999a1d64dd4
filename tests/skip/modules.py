"""Skippable modules that the tests of fxdp.skip share."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor, nn

from fxdp.skip import pop, skippable, stash


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", x)
        return x * 2


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        return x + skip


def declares(stash: Any = (), pop: Any = ()) -> nn.Module:
    """A skippable that declares these names and does nothing."""
    return skippable(stash=stash, pop=pop)(nn.Identity)()
