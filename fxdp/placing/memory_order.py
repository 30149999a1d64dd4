"""In which order an op fills memory: random numbers are laid down as the memory lies."""

from __future__ import annotations

import torch
from torch import fx

from fxdp.ir.metadata import MemoryLayout, meta, tensor_operands, typical_layout


def memory_order(node: fx.Node) -> tuple[int, ...]:
    """The dims, outermost first, of memory that torch makes like the first operand of a captured op.

    That is the operand's own order where it fills its memory. Where it does not (it was expanded, or sliced
    with gaps), torch makes dense memory by a rule of its own, so torch is asked. Empty where capture kept no
    layout.
    """
    layout = drawn_for(node)
    if layout is None:
        return ()
    like = torch.empty_strided(layout.sizes, layout.strides, device="meta")
    strides = torch.empty_like(like).stride()
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def memory_gaps(node: fx.Node) -> tuple[int, ...]:
    """The dims of the first operand whose elements lie further apart than what is in them: it was sliced.

    Or all in one place: it was expanded.
    """
    layout = drawn_for(node)
    found, step = [], 1
    for dim in reversed(memory_order(node)):
        assert layout is not None
        if layout.sizes[dim] > 1:
            if layout.strides[dim] > step or not layout.strides[dim]:
                found.append(dim)
            step = max(step, layout.strides[dim]) * layout.sizes[dim]
    return tuple(found)


def drawn_for(node: fx.Node) -> MemoryLayout | None:
    """How the operand lies that a random op draws for, as far as capture kept it."""
    return meta(node).draws_for or typical_layout(next(iter(tensor_operands(node)), node))
