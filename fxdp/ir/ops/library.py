"""The library of fxdp's own ops, `torch.ops.fxdp`, and torch's, of which they are made."""

from __future__ import annotations

import torch

from fxdp.torch_compat import OpOverload

aten = torch.ops.aten

library = torch.library.Library("fxdp", "FRAGMENT")  # type: ignore[no-untyped-call]


def existing(*names: str) -> tuple[OpOverload, ...]:
    """The aten overloads of these names (`"nonzero"`, `"searchsorted.Scalar"`) that this torch has."""
    found = []
    for name in names:
        base, _, overload = name.partition(".")
        packet = getattr(aten, base, None)
        op = getattr(packet, overload or "default", None)
        if op is not None:
            found.append(op)
    return tuple(found)
