"""The library of fxdp's own ops, `torch.ops.fxdp`, and torch's, of which they are made."""

from __future__ import annotations

import torch

__all__ = ["aten", "library"]

aten = torch.ops.aten

library = torch.library.Library("fxdp", "FRAGMENT")  # type: ignore[no-untyped-call]
