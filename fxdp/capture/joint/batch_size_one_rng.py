"""Batch-size-one RNG order: strides of a single sample may differ, and with them the order of random numbers.

    einsum("bti,ij->bjt", x, w)         2 samples: a transposed matrix product        1 sample: contiguous

Torch traces sizes of at least 2, so no guard shows the difference. With `rng="single-device"` a capture with
random ops is therefore valid for several samples only; the capture for a single sample takes the strides from
a second trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import sympy
from torch import fx

from fxdp.capture.captured import Captured, Condition
from fxdp.ir.graph.draws import draws
from fxdp.ir.graph.metadata import meta, tensor_operands, typical_layout
from fxdp.ir.types.sizes import B, named_size


def for_several(found: Captured) -> Captured:
    """Limit a capture with random ops to sizes that differ from 1."""
    return _limited(found, [sympy.Ne(size, 1) for size in (B, *_open_sizes(found))])


def for_one(found: Captured, single: fx.Graph) -> Captured:
    """Limit a capture to one sample, and order random numbers as in `single`, a trace of one sample.

    If the random ops of the two traces differ, the capture is limited to several samples instead.
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
