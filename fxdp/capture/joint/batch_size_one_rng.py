"""Random numbers as one device draws them for a single sample, which it may lay out as it does not several.

    einsum("bti,ij->bjt", x, w)         2 samples: a product of matrices, turned      1 sample: in order

No guard tells, as torch traces sizes of at least 2. So with `rng="single-device"` a capture that draws is one
for several samples; one for a single sample reads how things lie from a second trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import sympy
from torch import fx

from fxdp.capture.captured import Captured, Condition
from fxdp.ir.draws import draws
from fxdp.ir.metadata import meta, tensor_operands, typical_layout
from fxdp.ir.sizes import B, named_size


def for_several(found: Captured) -> Captured:
    """The capture, no size of which may be 1 if it draws."""
    return _limited(found, [sympy.Ne(size, 1) for size in (B, *_open_sizes(found))])


def for_one(found: Captured, single: fx.Graph) -> Captured:
    """The capture, whose draws come in the order of `single`, a trace of one sample, and for nothing else.

    If the trace draws by other ops, the capture stays one for several samples.
    """
    ours, theirs = _drawing(found.gm.graph), _drawing(single)
    if [node.target for node in ours] != [node.target for node in theirs]:
        return for_several(found)
    for node, one in zip(ours, theirs, strict=True):
        meta(node).draws_for = typical_layout(next(iter(tensor_operands(one)), one))
    return _limited(found, [sympy.Eq(B, 1), *(sympy.Ne(size, 1) for size in _open_sizes(found))])


def _drawing(graph: fx.Graph) -> list[fx.Node]:
    calls = graph.nodes
    return [n for n in calls if n.op == "call_function" and draws(n.target, n.args, n.kwargs)]


def _open_sizes(found: Captured) -> list[sympy.Symbol]:
    return [named_size(name) for name in found.symbols]


def _limited(found: Captured, limits: Iterable[Any]) -> Captured:
    first = next(iter(_drawing(found.gm.graph)), None)
    if first is None:
        return found
    made = tuple(Condition(limit, meta(first).location) for limit in limits)
    return replace(found, conditions=(*found.conditions, *made))
