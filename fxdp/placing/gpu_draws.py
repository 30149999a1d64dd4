"""Random ops that `rng="single-device"` refuses, because on a GPU their numbers depend on more than the op.

Both ops occur in graphs of GPUs alone: on CPUs, dropout and attention with dropout are several ops each.
"""

from __future__ import annotations

import sympy
from torch import fx

from fxdp.errors import PlacementError
from fxdp.ir.graph.graphs import argument, spread
from fxdp.ir.graph.metadata import memory_layout, meta, tensor_operands
from fxdp.ir.graph.signature import Buffer, Input, Parameter
from fxdp.ir.op_kinds import reads_shape_alone
from fxdp.ir.ops.full_batch_draws import FUSED_DROPOUTS
from fxdp.ir.ops.library import aten
from fxdp.ir.types.value_types import TensorType
from fxdp.placing.memory_order import drawn_for, memory_gaps

_NEW = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)
_ALIGNED = 128
"""Alignment in bytes, larger than any kernel requires."""


def check_draw(node: fx.Node) -> None:
    """Refuse a random op for which a single GPU may draw different numbers.

    Raises
    ------
    PlacementError : names the line and the remedy.
    """
    if node.target in FUSED_DROPOUTS and _begins_in_the_middle(node):
        raise PlacementError(
            f'{meta(node).location}: rng="single-device" cannot draw for a tensor that begins in the middle '
            "of "
            "another one's memory, as a GPU lays numbers down by addresses. Pass dropout a copy of it: "
            ".clone()"
        )
    mask = argument(node, "attn_bias") if argument(node, "dropout_p") else None
    if isinstance(mask, fx.Node) and not _is_given(mask):
        raise PlacementError(
            f'{meta(node).location}: rng="single-device" cannot draw for attention with a mask that is made '
            "of "
            "sizes alone: code may make one only while it is captured (that of transformers does where no "
            "attention_mask is passed), and without one a GPU draws other numbers. Pass the mask as an "
            'input, set the dropout of attention to 0, or use rng="sharded"'
        )


def _begins_in_the_middle(node: fx.Node) -> bool:
    """Return whether the operand starts at an unaligned offset in the memory of a tensor.

    Dropout's kernel processes as many elements at once as the operand's address allows, and draws in a
    different order for these (`dropout_cuda` in torch's `native/cuda/Dropout.cu`). With gaps the kernel
    processes one element at a time, at any address.
    """
    layout, operand = drawn_for(node), next(iter(tensor_operands(node)))
    if layout is None or memory_gaps(node):
        return False
    open_, type_ = memory_layout(operand), meta(operand).type
    assert isinstance(type_, TensorType)
    offset = sympy.expand(sympy.sympify(layout.offset if open_ is None else open_.offset))
    return any(n * type_.dtype.itemsize % _ALIGNED for n in offset.as_coefficients_dict().values())


def _is_given(mask: fx.Node) -> bool:
    """Return whether a mask depends on values of an input, a parameter or a buffer.

    If so, eager code has the mask, too.
    """
    unread = {node for node in mask.graph.nodes if reads_shape_alone(node.target) or node.target in _NEW}
    read = spread([mask], lambda node: () if node in unread else node.all_input_nodes)
    return any(isinstance(meta(node).spec, (Input, Parameter, Buffer)) for node in read)
