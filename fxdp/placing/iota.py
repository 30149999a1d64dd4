"""Detection of nodes that equal `arange(B)` along one dim, broadcast along all remaining dims.

Indexing a sharded dim with this value is local: every sample reads its own row. Hugging Face's
causal masks and pooled heads do this (`x[torch.arange(B), last]`).
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from fxdp.ir.graph.metadata import meta
from fxdp.ir.op_kinds import keeps_values
from fxdp.ir.ops.library import aten
from fxdp.ir.types.sizes import is_axis
from fxdp.ir.types.value_types import ScalarType, TensorType

_COUNTING = (torch.int64, torch.int32, torch.float64, torch.float32)
"""The dtypes that can hold the number of any sample; a cast to bool or to float16 does not keep `arange`."""


def iota_dim(node: fx.Node, known: dict[fx.Node, int]) -> int | None:
    """Return the dim along which `node` is `arange(B)`, or None; `known` has these dims of earlier nodes."""
    target, type_ = node.target, meta(node).type
    if not isinstance(type_, TensorType) or type_.dtype not in _COUNTING:
        return None
    if target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        return 0 if _counts_batch(node) else None
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source not in known:
        return None
    dim = known[source]
    if keeps_values(target):
        dim += _ndim(node) - _ndim(source)
        return dim if is_axis(_shape(node)[dim]) else None
    if target is aten.add.Tensor:  # of a number 0, as of positions without an offset
        return dim if node.args[1] == 0 and type_ == meta(source).type else None
    if target is aten.unsqueeze.default:
        at = int(node.args[1]) % _ndim(node)  # type: ignore[arg-type]
        return dim + 1 if at <= dim else dim
    if target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        return _only_batch_dim(node, source)
    if target is aten.slice.Tensor:
        return dim if type_ == meta(source).type else None
    return None


def _counts_batch(node: fx.Node) -> bool:
    values = [_expr(a) for a in node.args]
    if node.target is aten.arange.default:
        values = [0, values[0]]
    start, end = values[:2]
    step = values[2] if len(values) > 2 else 1
    return start == 0 and is_axis(end) and step == 1


def _expr(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        type_ = meta(argument).type
        return type_.expr if isinstance(type_, ScalarType) else None
    return argument


def _shape(node: fx.Node) -> tuple[int | sympy.Expr, ...]:
    type_ = meta(node).type
    return type_.shape if isinstance(type_, TensorType) else ()


def _ndim(node: fx.Node) -> int:
    return len(_shape(node))


def _only_batch_dim(node: fx.Node, source: fx.Node) -> int | None:
    """Return the only dim of size B if a view only adds or drops dims of size 1, else None."""
    sizes = [n for n in _shape(node) if n != 1]
    if len(sizes) != 1 or not is_axis(sizes[0]) or [n for n in _shape(source) if n != 1] != sizes:
        return None
    return _shape(node).index(sizes[0])
