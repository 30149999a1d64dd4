"""View of a graph node as an `Op`, the input of a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fxdp.ir.graph.metadata import meta
from fxdp.ir.types.value_types import ScalarType, TensorType
from fxdp.rules.registry import Op, Operand


def op_view(node: fx.Node, operand: Callable[[int, fx.Node], Operand]) -> tuple[Op, list[fx.Node]]:
    """Return the `Op` of a call, and the nodes of the operands.

    `operand(index, source)` creates each operand. SymInt nodes become expressions (or ints), and lists become
    tuples, so that an `Op` is hashable and equal for equal signatures.
    """
    sources: list[fx.Node] = []
    operands: list[Operand] = []

    def redistribute(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return redistribute_node(value)
        if isinstance(value, (list, tuple)):
            return tuple([redistribute(v) for v in value])
        return value

    def redistribute_node(source: fx.Node) -> Any:
        type_ = meta(source).type
        if isinstance(type_, TensorType):
            sources.append(source)
            operands.append(operand(len(operands), source))
            return operands[-1]
        if isinstance(type_, ScalarType):
            return int(type_.expr) if type_.expr.is_Integer else type_.expr
        return None

    args = redistribute(node.args)
    kwargs = tuple([(k, redistribute(v)) for k, v in node.kwargs.items()])
    tensors = tuple([t if isinstance(t, TensorType) else None for t in meta(node).types])
    return Op(node.target, args, kwargs, tuple(operands), tensors), sources  # type: ignore[arg-type]
