"""In which order an op fills memory: random numbers are laid down as the memory lies."""

from __future__ import annotations

import torch
from torch import fx

from fxdp.annotations import Layout, example_layout, memory_layout, tensor_operands
from fxdp.symbols import hint


def memory_order(node: fx.Node) -> tuple[int, ...]:
    """The dims, outermost first, of memory that torch makes like the first operand of a captured op.

    That is the operand's own order where it fills its memory. Where it does not (it was expanded, or sliced
    with gaps), torch makes dense memory by a rule of its own, so torch is asked. Empty where capture kept no
    layout.
    """
    layout = _in_numbers(next(iter(tensor_operands(node)), node))
    if layout is None:
        return ()
    like = torch.empty_strided(layout.sizes, layout.strides, device="meta")
    strides = torch.empty_like(like).stride()
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def memory_gaps(node: fx.Node) -> tuple[int, ...]:
    """The dims of the first operand whose elements lie further apart than what is in them: it was sliced."""
    layout = _in_numbers(next(iter(tensor_operands(node)), node))
    found, step = [], 1
    for dim in reversed(memory_order(node)):
        assert layout is not None
        if layout.sizes[dim] > 1:
            if layout.strides[dim] > step:
                found.append(dim)
            step = max(step, layout.strides[dim]) * layout.sizes[dim]
    return tuple(found)


def _in_numbers(node: fx.Node) -> Layout | None:
    """The example's layout, or a typical one where only the data fixes a size."""
    found = example_layout(node)
    if found is None or None not in (*found.sizes, *found.strides):
        return found
    open_ = memory_layout(node)
    assert open_ is not None
    sizes, strides = (tuple(max(1, hint(n)) for n in found) for found in (open_.sizes, open_.strides))
    return Layout(sizes, strides, open_.offset)
