"""The order in which an op fills memory: random numbers are written in memory order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxdp.ir.graph.metadata import MemoryLayout, meta, tensor_operands, typical_layout


def memory_order(node: fx.Node) -> tuple[int, ...]:
    """Return the dims, outermost first, of memory that torch allocates like a captured op's first operand.

    This is the operand's own order of dims if there are no gaps in memory. Otherwise (after an expand, or a
    slice with gaps) torch chooses an order for dense memory, so torch is asked. The result is empty
    if capture recorded no layout.
    """
    layout = drawn_for(node)
    return () if layout is None else order_and_gaps(layout.sizes, layout.strides)[0]


def memory_gaps(node: fx.Node) -> tuple[int, ...]:
    """Return the first operand's dims with gaps in memory (after a slice) or stride 0 (after an expand)."""
    layout = drawn_for(node)
    return () if layout is None else order_and_gaps(layout.sizes, layout.strides)[1]


def order_and_gaps(sizes: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `memory_order` and `memory_gaps` of a value with these sizes and strides."""
    like = torch.empty_strided(sizes, strides, device="meta")
    dense = torch.empty_like(like).stride()
    order = tuple(sorted(range(len(dense)), key=lambda dim: -dense[dim]))
    gaps, step = [], 1
    for dim in reversed(order):
        if sizes[dim] > 1:
            if strides[dim] > step or not strides[dim]:
                gaps.append(dim)
            step = max(step, strides[dim]) * sizes[dim]
    return order, tuple(gaps)


def drawn_for(node: fx.Node) -> MemoryLayout | None:
    """Return the memory layout for which a random op draws, as far as recorded by capture."""
    return meta(node).draws_for or typical_layout(next(iter(tensor_operands(node)), node))
