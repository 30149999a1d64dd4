"""The library of fxdp's own ops, `torch.ops.fxdp`, and access to torch's ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxdp.torch_compat import OpOverload, there
from fxdp.torch_compat import aten as aten

library = torch.library.Library("fxdp", "FRAGMENT")  # type: ignore[no-untyped-call]


def existing(*names: str) -> tuple[OpOverload, ...]:
    """Return the aten overloads of these names (`"nonzero"`, `"searchsorted.Scalar"`) that this torch has."""
    split = (name.partition(".") for name in names)
    return there(getattr(getattr(aten, base), overload or "default") for base, _, overload in split)


def opaque(schema: str, function: Callable[..., Any], fake: Callable[..., Any], **options: Any) -> OpOverload:
    """Register an op that stays one node in a graph; `fake` returns results of the right shape and dtype."""
    name = schema.partition("(")[0]
    library.define(schema, **options)  # type: ignore[no-untyped-call]
    library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fxdp::{name}", fake, lib=library)
    return getattr(torch.ops.fxdp, name).default  # type: ignore[no-any-return]


COMPOSITIONS: dict[Any, Callable[..., torch.Tensor]] = {}
"""The function of each op of fxdp that is a composition of plain ops."""


def composed(schema: str, function: Callable[..., torch.Tensor]) -> OpOverload:
    """Register an op that is a composition of plain ops."""
    name = schema.partition("(")[0]
    library.define(schema)  # type: ignore[no-untyped-call]
    library.impl(name, function, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    op: OpOverload = getattr(torch.ops.fxdp, name).default
    COMPOSITIONS[op] = function
    return op
