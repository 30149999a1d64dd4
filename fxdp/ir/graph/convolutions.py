"""Split of a convolution's backward into two calls: the input's gradient, and the weights' gradients.

The previous layer waits for the first; the second can be delayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fxdp.ir.graph.graphs import argument
from fxdp.ir.graph.metadata import copy_meta, meta


def gradients_apart(backward: fx.Node) -> None:
    """Compute the gradients of the input and of the weights by separate calls, if one call computes both.

    Kernels compute both one after another anyway.
    """
    mask = list(argument(backward, "output_mask"))
    if not mask[0] or not any(mask[1:]):
        return
    with backward.graph.inserting_after(backward):
        weights = backward.graph.node_copy(backward, lambda n: n)
    copy_meta(backward, weights)
    _only(backward, [True, False, False])
    _only(weights, [False, *mask[1:]])
    for item in list(backward.users):
        if item.args[1] != 0:
            item.replace_input_with(backward, weights)


def _only(convolution: fx.Node, mask: list[Any]) -> None:
    """Restrict a convolution's backward to the results of `mask`."""
    convolution.args = (*convolution.args[:-1], mask)
    known = meta(convolution)
    if isinstance(known.type, tuple):
        known.type = _kept(known.type, mask)
    if isinstance(known.placement, tuple):
        known.placement = _kept(known.placement, mask)
    if "val" in convolution.meta:
        convolution.meta["val"] = _kept(convolution.meta["val"], mask)


def _kept(values: Sequence[Any], mask: list[Any]) -> tuple[Any, ...]:
    return tuple(value if wanted else None for value, wanted in zip(values, mask, strict=True))
