"""Ties that rounding decides: `x > y` or `sgn(x - y)` for operands that are equal up to the last bits.

    similarity of a sample with itself:   1 - 2e-16 on one device, 1 on a rank
    sgn(similarity - 1):                  -1, 0

Neither result is wrong, but all later values may differ: the ranks continue with the result of one device,
so that later values can still be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from fxdp.torch_compat import aten

_KINDS = ("Tensor", "Scalar")
_JUMPS: dict[Any, int] = {
    **{getattr(getattr(aten, f), kind): 0 for f in ("eq", "ne", "lt", "le", "gt", "ge") for kind in _KINDS},
    **{getattr(aten, f).default: 0 for f in ("sgn", "sign", "floor", "ceil", "round", "trunc")},
    **{getattr(aten, f"{f}_backward").default: 1 for f in ("threshold", "leaky_relu", "hardtanh")},
}
"""Ops whose result jumps at a threshold, with the position of the operand that passes the threshold."""
_PASSES = {getattr(getattr(aten, f), kind): getattr(aten.lt, kind) for f in ("eq", "ne") for kind in _KINDS}
"""For ops with equal results on both sides of a threshold, an op with different results."""


def moved_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose rounding may decide the result of an op that jumps; empty for any other op.

    The first operand passes a threshold; a second operand is the value that the first is compared with.
    """
    place = _JUMPS.get(node.target)
    values = [] if place is None else [arg for arg in node.args[place:] if isinstance(arg, fx.Node)]
    return values if place == 0 else values[:1]


def is_tie(
    node: fx.Node, value_of: Callable[[fx.Node], Any], found: Tensor, full: Tensor, step: float
) -> bool:
    """Return whether `found` and `full` differ only where the first moved operand is near the threshold.

    `found` is the combined result of the ranks, `full` the result of one device. Near means that the operand
    passes the threshold within `step`, up or down.
    """
    first, *_ = moved_operands(node)
    if not value_of(first).is_floating_point():
        return False
    jump = _PASSES.get(node.target, node.target)
    least, most = (
        jump(*fx.map_arg(node.args, lambda n, by=by: value_of(n) + by if n is first else value_of(n)))  # type: ignore[misc]
        for by in (-step, step)
    )
    return bool(((found == full) | (least != most)).all())
