"""The order in which an op fills memory: random numbers are written in memory order."""

from __future__ import annotations

import torch
from torch import fx

from fxdp.ir.metadata import MemoryLayout, meta, tensor_operands, typical_layout


def memory_order(node: fx.Node) -> tuple[int, ...]:
    """Return the dims, outermost first, of memory that torch allocates like a captured op's first operand.

    This is the operand's own order of dims if there are no gaps in memory. Otherwise (after an expand, or a
    slice with gaps) torch chooses an order for dense memory, so torch is asked. The result is empty
    if capture recorded no layout.
    """
    layout = drawn_for(node)
    if layout is None:
        return ()
    like = torch.empty_strided(layout.sizes, layout.strides, device="meta")
    strides = torch.empty_like(like).stride()
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def memory_gaps(node: fx.Node) -> tuple[int, ...]:
    """Return the first operand's dims with gaps in memory (after a slice) or stride 0 (after an expand)."""
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
    """Return the memory layout for which a random op draws, as far as recorded by capture."""
    return meta(node).draws_for or typical_layout(next(iter(tensor_operands(node)), node))
