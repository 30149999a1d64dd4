"""Refuse reads of uninitialized memory: `torch.empty(3) * x`.

Uninitialized values differ between ranks and calls, so results cannot be equal to one device's. An
uninitialized tensor is allowed if only the shape is read (`torch.empty(3).normal_()`), or if all parts are
overwritten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxdp.errors import CaptureError
from fxdp.ir.graph.metadata import meta
from fxdp.ir.op_kinds import is_unwritten, is_view, reads_shape_alone
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import aten

_MOVES = frozenset({aten.clone.default, aten._to_copy.default, aten.cat.default, aten.stack.default})
_CHOOSES = frozenset(
    {
        aten.where.self, aten.copy.default, aten.masked_fill.Tensor, aten.masked_fill.Scalar,
        aten.fill.Tensor,
    }
)  # fmt: skip
"""Pointwise ops that may ignore the values of an operand."""
_READS = frozenset({aten.mm.default, aten.bmm.default, aten.sum.default, aten.sum.dim_IntList})
"""Ops that are not pointwise, and read all operands."""


def check_unwritten(graph: fx.Graph) -> None:
    """Raise on arithmetic with values of the forward that no op has written.

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
                    "every call. Make it with torch.zeros, or write all of it first"
                )


def _is_empty(node: fx.Node) -> bool:
    type_ = meta(node).type
    return isinstance(type_, TensorType) and any(size == 0 for size in type_.shape)


def _reader(node: fx.Node) -> fx.Node | None:
    """Return the first op that computes with the values of a node, or of a view or copy of the node."""
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
