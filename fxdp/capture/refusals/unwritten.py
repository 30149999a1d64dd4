"""Memory that is read before anything was written into it: `torch.empty(3) * x`.

What stands there is chance, another on each rank and at each call, so nothing can be equal. Where it is only
shape (`torch.empty(3).normal_()`), or is overwritten in parts, it is as good as any tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxdp.errors import CaptureError
from fxdp.ir.metadata import meta
from fxdp.ir.op_kinds import is_unwritten, is_view, reads_shape_alone
from fxdp.ir.types import TensorType
from fxdp.torch_compat import aten

_MOVES = frozenset({aten.clone.default, aten._to_copy.default, aten.cat.default, aten.stack.default})
_CHOOSES = frozenset(
    {
        aten.where.self, aten.copy.default, aten.masked_fill.Tensor, aten.masked_fill.Scalar,
        aten.fill.Tensor,
    }
)  # fmt: skip
"""Pointwise, and yet it may be that nothing is read of an operand."""
_READS = frozenset({aten.mm.default, aten.bmm.default, aten.sum.default, aten.sum.dim_IntList})
"""Not pointwise, and reads all of its operands."""


def check_unwritten(graph: fx.Graph) -> None:
    """Refuse arithmetic with values of the forward that nothing has written.

    Raises
    ------
    CaptureError : with the line that makes the memory and the line that reads it.
    """
    for node in graph.nodes:
        if is_unwritten(node.target) and not meta(node).backward and not _is_empty(node):
            reader = _reader(node)
            if reader is not None:
                raise CaptureError(
                    f"at {meta(reader).location}: reads memory that nothing has written since "
                    f"{meta(node).location} made it: its values are chance, others on every rank and at "
                    "every "
                    "call. Make it with torch.zeros, or write all of it first"
                )


def _is_empty(node: fx.Node) -> bool:
    type_ = meta(node).type
    return isinstance(type_, TensorType) and any(size == 0 for size in type_.shape)


def _reader(node: fx.Node) -> fx.Node | None:
    """The first op that computes with the values of a node, or of a view or copy of them."""
    for user in node.users:
        found = _reader(user) if is_view(user.target) or user.target in _MOVES else user
        if found is not None and (found is not user or _computes(user)):
            return found
    return None


def _computes(node: fx.Node) -> bool:
    target: Any = node.target
    if target in _CHOOSES or reads_shape_alone(target):
        return False
    return target in _READS or torch.Tag.pointwise in getattr(target, "tags", ())
