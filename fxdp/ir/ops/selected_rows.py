"""Row numbers of a rank's own rows that values select, counted from the first row of all ranks."""

from __future__ import annotations

import torch

from fxdp.ir.ops.library import aten, composed


def _nonzero(self: torch.Tensor, column: int, offset: int) -> torch.Tensor:
    found = aten.nonzero.default(self)
    if self.dim() == 1:
        return found + offset  # type: ignore[no-any-return]
    first = torch.arange(self.dim(), device=self.device) == column
    return found + first * offset  # type: ignore[no-any-return]


def _repeat_interleave(repeats: torch.Tensor, offset: int) -> torch.Tensor:
    return aten.repeat_interleave.Tensor(repeats) + offset  # type: ignore[no-any-return]


nonzero = composed("nonzero_from(Tensor self, int column, SymInt offset) -> Tensor", _nonzero)
"""`aten.nonzero` of a part, with positions in the full value: `column` counts from `offset`."""
repeat_interleave = composed(
    "repeat_interleave_from(Tensor repeats, SymInt offset) -> Tensor", _repeat_interleave
)
"""`aten.repeat_interleave.Tensor` of a part, with row numbers that count from `offset`."""
