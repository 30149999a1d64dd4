"""In which order an op fills memory: random numbers are laid down as the memory lies."""

from __future__ import annotations

import sympy
import torch
from torch import fx

from fxdp.errors import PlacementError
from fxdp.ir.notes import MemoryLayout, memory_layout, note, tensor_operands, typical_layout
from fxdp.ir.ops.whole_draws import FUSED_DROPOUTS
from fxdp.ir.types import TensorType

_ALIGNED = 128
"""Bytes: more than any kernel asks for."""


def memory_order(node: fx.Node) -> tuple[int, ...]:
    """The dims, outermost first, of memory that torch makes like the first operand of a captured op.

    That is the operand's own order where it fills its memory. Where it does not (it was expanded, or sliced
    with gaps), torch makes dense memory by a rule of its own, so torch is asked. Empty where capture kept no
    layout.
    """
    layout = _drawn_for(node)
    if layout is None:
        return ()
    like = torch.empty_strided(layout.sizes, layout.strides, device="meta")
    strides = torch.empty_like(like).stride()
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def memory_gaps(node: fx.Node) -> tuple[int, ...]:
    """The dims of the first operand whose elements lie further apart than what is in them: it was sliced.

    Or all in one place: it was expanded.
    """
    layout = _drawn_for(node)
    found, step = [], 1
    for dim in reversed(memory_order(node)):
        assert layout is not None
        if layout.sizes[dim] > 1:
            if layout.strides[dim] > step or not layout.strides[dim]:
                found.append(dim)
            step = max(step, layout.strides[dim]) * layout.sizes[dim]
    return tuple(found)


def check_start(node: fx.Node) -> None:
    """Refuse a draw on a GPU whose operand begins where a whole tensor would not.

    Dropout's kernel there takes as many elements at once as the operand's address allows, and draws for them
    in another order (`dropout_cuda` in torch's `native/cuda/Dropout.cu`). On CPUs dropout is several ops.

    Raises
    ------
    PlacementError : names the line, and the copy that begins at an address of its own.
    """
    layout = _drawn_for(node)
    if node.target not in FUSED_DROPOUTS or layout is None or memory_gaps(node):
        return  # with gaps it takes one at a time
    open_ = memory_layout(next(iter(tensor_operands(node))))
    offset = sympy.expand(sympy.sympify(layout.offset if open_ is None else open_.offset))
    type_ = note(next(iter(tensor_operands(node)))).type
    assert isinstance(type_, TensorType)
    if any(number * type_.dtype.itemsize % _ALIGNED for number in offset.as_coefficients_dict().values()):
        raise PlacementError(
            f'{note(node).site}: rng="single-device" cannot draw for a tensor that begins in the middle of '
            f"another one's memory, as a GPU lays numbers down by addresses. Pass dropout a copy of it: "
            ".clone()"
        )


def _drawn_for(node: fx.Node) -> MemoryLayout | None:
    return note(node).draws_for or typical_layout(next(iter(tensor_operands(node)), node))
