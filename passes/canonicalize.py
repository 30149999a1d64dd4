"""Bring the captured graph into the canonical form that later passes expect."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from fxdp.errors import PlacementError
from fxdp.ir.graph.graphs import erase_unused
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import copy_meta, example_layout, memory_layout, meta
from fxdp.ir.op_kinds import is_identity
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.sizes import product
from fxdp.ir.types.value_types import ScalarType, TensorType
from fxdp.torch_compat import OpOverload, aten

_Rewrite: TypeAlias = Callable[[fx.Node], bool]
"""A rewrite of one node into canonical form.

Returns False if no form exists that runs on local shards.
"""


def _hand_on_skip(node: fx.Node, source: fx.Node) -> None:
    """Move the skip labels of an identity op to the operand, which replaces the identity."""
    labels = [label for label in (meta(source).skip, meta(node).skip) if label]
    meta(source).skip = ", ".join(labels) or None


def _computed_as(target: OpOverload) -> _Rewrite:
    """Return a rewrite that replaces an op which only sets a flag by an op that computes the result.

    Collectives and concatenations drop the conjugate and negative flags of a tensor.
    """

    def rewrite(node: fx.Node) -> bool:
        node.target = target
        return True

    return rewrite


def _conjugate(node: fx.Node) -> bool:
    """Compute a conjugate at once; that of a Python number, as in the backward of `1j * x`, is a constant."""
    node.target, (value, *_) = aten._conj_physical.default, node.args
    type_ = meta(node).type
    if isinstance(value, complex) and isinstance(type_, TensorType):  # to which no op on tensors applies
        node.target, node.args = aten.scalar_tensor.default, (value.conjugate(),)
        node.kwargs = {"dtype": type_.dtype}
    return True


def _say_what_strides_mean(node: fx.Node) -> bool:
    """Replace an `as_strided` that only reshapes an entire contiguous value; return whether it does.

    That includes the strides of adaptive pooling's result. `as_strided_scatter` with these strides replaces
    every element, and becomes a `reshape` of the scattered value.
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
    """Make `as_strided` read a copy with dims in the order of decreasing stride.

    x of shape [B, 3, 4] with the strides of [B, 4, 3]:
        as_strided(x, ...)  ->  as_strided(x.permute(0, 2, 1).contiguous(), ...)

    Return False, and change nothing, if the memory of the value has gaps or overlaps.
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
    """Return whether a captured value is contiguous and starts at offset 0 of the storage."""
    layout = memory_layout(source)
    return layout is not None and layout.offset == 0 and _row_major(layout.sizes, layout.strides)


def _same_type(node: fx.Node) -> bool:
    source = node.args[0]
    return (
        isinstance(source, fx.Node)
        and isinstance(meta(node).type, TensorType)
        and (meta(source).type == meta(node).type)
    )


def _taken_out(node: fx.Node) -> fx.Node | None:
    """Return the operand that a node takes out of a `stack` along dim 0: `torch.stack([a, b])[1]` is b.

    So it is of a stack whose operands a `flip` has turned round, as nodes and hyperedges of pairs.
    """
    dim: Sequence[Any]
    if node.target is aten.select.int:
        stack, *dim, place = node.args
    elif node.target is operator.getitem and node.all_input_nodes[0].target is aten.unbind.int:
        (stack, *dim), place = node.all_input_nodes[0].args, node.args[1]
    else:
        return None
    is_turned = isinstance(stack, fx.Node) and stack.target is aten.flip.default and stack.args[1] == [0]
    if is_turned and isinstance(place, int):
        stack, place = stack.args[0], -1 - place  # type: ignore[union-attr]
    if not isinstance(stack, fx.Node) or stack.target is not aten.stack.default or any(dim):
        return None
    operands, *along = stack.args
    found = operands[place] if isinstance(place, int) and not any(along) else None  # type: ignore[index]
    is_equal = isinstance(found, fx.Node) and meta(found).type == meta(node).type and _in_order(found)
    return found if is_equal else None  # type: ignore[return-value]


def _drop_empty_operands(cat: fx.Node) -> bool:
    """Drop the empty operands of a `cat`, including torch's legacy 1-d empty tensor beside any operand."""
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
    aten._conj.default: _conjugate,
    aten._neg_view.default: _computed_as(aten.neg.default),
    aten.cat.default: _drop_empty_operands,
    aten.as_strided.default: lambda node: _say_what_strides_mean(node) or _lay_in_order(node),
    # one that cannot be rewritten runs replicated
    aten.as_strided_scatter.default: lambda node: _say_what_strides_mean(node) or True,
}
"""The rewrite for each op that has a canonical form."""


@dataclass(frozen=True)
class Canonicalize:
    """Remove identity ops (`detach`, `alias`, `x[:]`) and unused ops; bring ops into their canonical form.

    before: `%detach = aten.detach(%relu)` and `%mul = aten.mul.Tensor(%detach, %grad)`
    after:  `%mul = aten.mul.Tensor(%relu, %grad)`

    An identity of an input that is itself a result stays, so that no result is an input. `cat` loses the
    operands that are empty for every batch (an empty key-value cache), because no rule could place these.
    What is taken out of a `stack` is its operand. `as_strided` becomes a `view` where it only reshapes an
    entire contiguous value. Elsewhere its operand is first made contiguous in the order of its dims, because
    gathered values are contiguous. Conjugates are computed at once.
    """

    name = "canonicalize"
    requires = Level.CAPTURED
    ensures = Level.CAPTURED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place.

        Raises
        ------
        PlacementError : on several ranks, `as_strided` reads a value with gaps or overlaps in memory.
        """
        results = set(gm.graph.output_node().all_input_nodes)
        unclear: list[fx.Node] = []
        for node in list(gm.graph.nodes):
            rewrite = _REWRITES.get(node.target)
            if rewrite is not None and not rewrite(node):
                unclear.append(node)
            # an identity that is a result stays: without it the program would return an input
            equal = node.args[0] if is_identity(node.target) and _same_type(node) else _taken_out(node)
            if isinstance(equal, fx.Node) and node not in results:
                _hand_on_skip(node, equal)
                node.replace_all_uses_with(equal)
                gm.graph.erase_node(node)
        erase_unused(gm.graph)
        if unclear and mesh.size > 1:
            _refuse(unclear)
        return gm
