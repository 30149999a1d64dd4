"""Bring the captured graph into the one form that later passes read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from fxdp.errors import PlacementError
from fxdp.ir.graphs import erase_unused
from fxdp.ir.level import Level
from fxdp.ir.mesh import Mesh
from fxdp.ir.metadata import copy_meta, example_layout, memory_layout, meta
from fxdp.ir.op_kinds import is_identity
from fxdp.ir.sizes import product
from fxdp.ir.types import ScalarType, TensorType
from fxdp.torch_compat import OpOverload

aten = torch.ops.aten

_Rewrite: TypeAlias = Callable[[fx.Node], bool]
"""Brings a node into its form; False where it has none that ranks could run on their parts."""


def _hand_on_skip(node: fx.Node, source: fx.Node) -> None:
    """A skip that an identity carried is carried by what it copied."""
    labels = [label for label in (meta(source).skip, meta(node).skip) if label]
    meta(source).skip = ", ".join(labels) or None


def _computed_as(target: OpOverload) -> _Rewrite:
    """Another op in place of one that only marks its result: sending or joining values loses the marks."""

    def rewrite(node: fx.Node) -> bool:
        node.target = target
        return True

    return rewrite


def _say_what_strides_mean(node: fx.Node) -> bool:
    """Row-major strides over all of a contiguous value take its elements in order: whether they do.

    So does the layout that adaptive pooling gives its result; a scatter then replaces every element.
    """
    scatter = node.target is aten.as_strided_scatter.default
    source, *rest = node.args
    size, stride, *offset = rest[scatter:]
    shape = tuple(map(_number, size))  # type: ignore[arg-type]
    strides = tuple(map(_number, stride))  # type: ignore[arg-type]
    full = meta(source).type  # type: ignore[arg-type]
    if not isinstance(full, TensorType) or not _in_order(source) or (offset and offset[0] not in (0, None)):
        return False
    if product(*shape) != product(*full.shape) or not _row_major(shape, strides):
        return False
    node.target = aten.view.default
    if scatter:
        node.target = aten.reshape.default
        node.args = (rest[0], list(full.shape))
    else:
        node.args = (source, size)
    return True


def _lay_in_order(node: fx.Node) -> bool:
    """Let `as_strided` read a copy whose dims are in the order of the memory that its strides count.

    x [B, 3, 4] lies as [B, 4, 3]:   as_strided(x, ...)  ->  as_strided(x.permute(0, 2, 1).contiguous(), ...)

    Whether that is possible: not for memory with gaps or overlaps.
    """
    source = node.args[0]
    assert isinstance(source, fx.Node)
    layout, example, type_ = memory_layout(source), example_layout(source), meta(source).type
    if layout is None or example is None or not isinstance(type_, TensorType):
        return False
    if _in_order(source):
        return True
    order = sorted(range(len(type_.shape)), key=lambda d: -(example.strides[d] or 0))
    sizes, strides = (tuple(given[d] for d in order) for given in (layout.sizes, layout.strides))
    if layout.offset != 0 or not _row_major(sizes, strides):
        return False
    shape = TensorType(type_.dtype, tuple(type_.shape[d] for d in order))
    with node.graph.inserting_before(node):
        turned = node.graph.call_function(aten.permute.default, (source, order))
        copy = node.graph.call_function(
            aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}
        )
    for made in (turned, copy):
        copy_meta(node, made, type=shape)
    node.replace_input_with(source, copy)
    return True


def _refuse(nodes: list[fx.Node]) -> None:
    listing = "\n  ".join(str(meta(node).location) for node in nodes)
    raise PlacementError(
        "as_strided counts in memory that has gaps or overlaps, of which a rank holds a part only:\n"
        f"  {listing}\n"
        "Call .contiguous() on the value first, or write the view with indexing, view, transpose or unfold"
    )


def _number(size: Any) -> Any:
    type_ = meta(size).type if isinstance(size, fx.Node) else None
    return type_.expr if isinstance(type_, ScalarType) else size


def _row_major(shape: tuple[Any, ...], strides: tuple[Any, ...]) -> bool:
    step: Any = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step = product(step, size)
    return True


def _in_order(source: Any) -> bool:
    """Whether a captured value lies contiguously at the start of its memory."""
    layout = memory_layout(source)
    return layout is not None and layout.offset == 0 and _row_major(layout.sizes, layout.strides)


def _same_type(node: fx.Node) -> bool:
    source = node.args[0]
    return (
        isinstance(source, fx.Node)
        and isinstance(meta(node).type, TensorType)
        and (meta(source).type == meta(node).type)
    )


def _drop_empty_operands(cat: fx.Node) -> bool:
    """`cat([nothing, x])` is `x`, also torch's legacy of a 1-d nothing beside any `x`."""
    full = meta(cat).type
    if not isinstance(full, TensorType):
        return True
    operands: list[fx.Node] = list(cat.args[0])  # type: ignore[arg-type]
    types = [meta(n).type for n in operands]
    dim = int(cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0))  # type: ignore[arg-type]
    kept = [n for n, t in zip(operands, types, strict=True) if not _is_empty(t, dim % len(full.shape))]
    if any(meta(n).type.dtype == full.dtype for n in kept):  # type: ignore[union-attr]
        cat.args = (kept, *cat.args[1:])
    return True


def _is_empty(type_: object, dim: int) -> bool:
    if not isinstance(type_, TensorType):
        return False
    return type_.shape == (0,) or (dim < len(type_.shape) and type_.shape[dim] == 0)


_REWRITES: dict[Any, _Rewrite] = {
    aten._conj.default: _computed_as(aten._conj_physical.default),
    aten._neg_view.default: _computed_as(aten.neg.default),
    aten.cat.default: _drop_empty_operands,
    aten.as_strided.default: lambda node: _say_what_strides_mean(node) or _lay_in_order(node),
    # what is left runs replicated, as it is written
    aten.as_strided_scatter.default: lambda node: _say_what_strides_mean(node) or True,
}
"""The ops that have a form of their own, and what brings them into it."""


@dataclass(frozen=True)
class Canonicalize:
    """After it no identity op (`detach`, `alias`, `x[:]`) and no unused op is left.

    before: `%detach = aten.detach(%relu)` and `%mul = aten.mul.Tensor(%detach, %grad)`
    after:  `%mul = aten.mul.Tensor(%relu, %grad)`

    An identity of an input that is itself a result stays, so that no result is an input. `cat` loses the
    operands that are empty whatever the batch (an empty key-value cache), which no rule could place.
    `as_strided` over all of a contiguous value in its own order is a `view`; its operand lies in the order of
    its dims, since what ranks put together does. Conjugates are computed at once.
    """

    name = "canonicalize"
    requires = Level.CAPTURED
    ensures = Level.CAPTURED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place.

        Raises
        ------
        PlacementError : on several ranks, `as_strided` of a value that lies in memory with gaps or overlaps.
        """
        results = set(gm.graph.output_node().all_input_nodes)
        unclear: list[fx.Node] = []
        for node in list(gm.graph.nodes):
            rewrite = _REWRITES.get(node.target)
            if rewrite is not None and not rewrite(node):
                unclear.append(node)
            # one that is a result stays, lest the program return an input as it is
            if is_identity(node.target) and _same_type(node) and node not in results:
                _hand_on_skip(node, node.args[0])
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
        erase_unused(gm.graph)
        if unclear and mesh.size > 1:
            _refuse(unclear)
        return gm
