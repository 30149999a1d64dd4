"""Ties that rounding decides: `x > y` or `sgn(x - y)` where both are equal but for the last bits.

    similarity of a sample with itself:   1 - 2e-16 on one device, 1 on a rank
    sgn(similarity - 1):                  -1, 0

Neither is wrong, and all that is computed of them may differ: the ranks go on with one device's answers, so
that whatever comes after is still compared.
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
"""Ops whose answer jumps where their operand of this number passes a threshold."""
_PASSES = {getattr(getattr(aten, f), kind): getattr(aten.lt, kind) for f in ("eq", "ne") for kind in _KINDS}
"""Those that answer alike on both sides of it, by one that does not."""


def moved_operands(node: fx.Node) -> list[fx.Node]:
    """The values whose rounding decides what an op answers that jumps; none of other ops.

    The first is that which passes a threshold, another one is what it is compared with.
    """
    place = _JUMPS.get(node.target)
    values = [] if place is None else [arg for arg in node.args[place:] if isinstance(arg, fx.Node)]
    return values if place == 0 else values[:1]


def is_tie(
    node: fx.Node, value_of: Callable[[fx.Node], Any], found: Tensor, full: Tensor, step: float
) -> bool:
    """Whether `found` differs from `full` only where the first of `moved_operands` is near the threshold.

    `found` is what the ranks have made of the node, `full` what one device has. Near is what passes the
    threshold within a step up or down.
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
