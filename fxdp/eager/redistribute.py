"""Redistribute a local value at once, by the compiler's table of redistributions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.message_report import COUNTS
from fxdp.ir.ops import collectives
from fxdp.ir.redistribution_entry import Call
from fxdp.ir.routes import route
from fxdp.ir.types.placements import Placement, R
from fxdp.ir.types.value_types import TensorType


@dataclass(frozen=True, slots=True)
class _AtOnce:
    """The context that the table's functions ask for, with values instead of nodes."""

    axis: BatchAxis
    dtype: torch.dtype
    device: torch.device
    shown: bool = False

    @property
    def group(self) -> str:
        return self.axis.ranks.group

    @property
    def world(self) -> int:
        return self.axis.ranks.world

    @property
    def index(self) -> int:
        return self.axis.ranks.rank

    @property
    def number(self) -> int:
        return self.axis.ranks.rank

    def size(self, name: str) -> Any:
        return self.axis.values[name]

    def largest(self) -> Any:
        return self.axis.largest

    def rows(self) -> Any:
        return self.axis.positions(self.device)

    def part(self, value: Any, dim: int, outer: int) -> Call:
        batch = self.size("B"), self.size("offset"), self.size("b")
        return collectives.shard, (value, dim, outer, *batch)


def redistributed(
    local: Tensor, type_: TensorType, have: Placement, want: Placement, axis: BatchAxis, cause: str
) -> Tensor:
    """Return this rank's local value in another placement; a collective call unless only a slice is taken.

    Parameters
    ----------
    type_ : dtype and global shape, with sizes in `B`.
    axis : the batch along which `have` and `want` shard.
    cause : the op that needs it, for the report.
    """
    if have == want or axis.ranks.world == 1:
        return local
    steps, at = route(have, want), have
    for number, step in enumerate(steps, 1):
        to = want if number == len(steps) else R
        arguments = step.arguments(type_, at, to)
        context: Any = _AtOnce(axis, type_.dtype, local.device)
        if step.finish is None:
            function, values = step.start(context, local, *arguments)
            local = function(*values)
        else:
            COUNTS.add(cause, step.target.__name__, local.numel() * local.element_size())
            with axis.ranks.message(f"{step.target.__name__} of {list(type_.shape)} for {cause}"):
                function, values = step.start(context, local.contiguous(), *arguments)
                pending = function(*values)
                function, values = step.finish(context, pending, *arguments)
                local = function(*values)
        at = to
    return local
