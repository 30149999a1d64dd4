"""Turn the program of the global batch into the program of one rank."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.graph_text import target_text
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import copy_meta, is_host_size, meta, tensor_operands, tensor_type
from fxdp.ir.graph.signature import Size
from fxdp.ir.ops.layouts import READ_AS_THEY_LIE, lay_out
from fxdp.ir.types.born_axes import in_parts, is_born
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import R, Shard
from fxdp.ir.types.sizes import axis as axis_named
from fxdp.ir.types.sizes import axis_of, named_size
from fxdp.ir.types.value_types import ScalarType, TensorType
from fxdp.placing.caller_numbers import enter, own_numbers
from fxdp.placing.op_view import op_view
from fxdp.placing.own_columns import OwnRange, own_part
from fxdp.placing.size_exchanges import ExchangedSizes, axis_along, gather_tangents_later
from fxdp.rules.localize import SIZE_ARGUMENT, MinusOffset, OwnColumns, local_target, localized
from fxdp.rules.registry import Alternative, Operand
from fxdp.torch_compat import OpOverload, interpret_sympy


@dataclass
class _Sizes:
    """Host integers of a program: size inputs at the top, arithmetic on sizes right before the first use."""

    graph: fx.Graph
    ranks: int
    nodes: dict[sympy.Basic, fx.Node] = field(default_factory=dict)
    of_data: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.exchanged = ExchangedSizes(self.ranks, self.of)

    def add_axes(self, names: Iterable[str]) -> None:
        """Insert placeholders for the sizes of batch axes."""
        for name in names:
            of, behind = axis_named(name), f"_{name}" if name else ""
            own = f"global{behind or '_batch'}", f"local{behind or '_batch'}", f"offset{behind}"
            self.add_specs(dict(zip(own, (of.total, of.local, of.offset), strict=True)))

    def add_specs(self, symbols: Mapping[str, sympy.Symbol]) -> None:
        """Insert one placeholder per symbol, by name, before those of tensors."""
        first = next(node for node in self.graph.nodes if not isinstance(meta(node).spec, Size))
        with self.graph.inserting_before(first):
            for name, symbol in symbols.items():
                node = self.graph.placeholder(name)
                meta(node).spec, meta(node).type = Size(symbol.name), ScalarType(symbol)
                self.nodes[symbol] = node

    def of(self, expr: Any, user: fx.Node) -> Any:
        """Return a number, or the node that computes the expression before `user`."""
        if not isinstance(expr, sympy.Basic):
            return expr
        if expr.is_Integer:
            return int(expr)
        if expr.is_Number:
            return float(expr)
        expr = in_parts(expr)
        # shared: graphs of deep models have the same few products of `b` hundreds of times
        if expr not in self.nodes:
            for symbol in sorted(expr.free_symbols - self.nodes.keys(), key=str):
                self.nodes[symbol] = self.exchanged.number(symbol, user)
        if expr not in self.nodes:
            self.nodes[expr] = self._compute(expr, user)
        return self.nodes[expr]

    def read_from(self, node: fx.Node) -> None:
        """Read data-dependent sizes (of `nonzero`, say) from the first tensor with this size.

        A rank's part of rows that are an axis tells the rank's size.
        """
        type_, placement = meta(node).type, meta(node).placement
        if not isinstance(type_, TensorType) or node.target in redistributions.COLLECTIVES:
            return
        for dim, size in enumerate(type_.shape):
            if isinstance(placement, Shard) and placement.dim == dim:
                along = axis_of(size)
                size = along.local if along is not None and size == along.total else size
            if isinstance(size, sympy.Symbol) and size not in self.nodes and "+" not in size.name:
                with self.graph.inserting_after(node):
                    read = self.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                meta(read).type, meta(read).location = ScalarType(size), meta(node).location
                meta(read).backward = meta(node).backward
                self.nodes[size] = read

    def keep(self, node: fx.Node) -> None:
        """Use a node as the value of the number that it reads from data, or computes from such numbers."""
        type_ = meta(node).type
        assert isinstance(type_, ScalarType)
        self.nodes.setdefault(type_.expr, node)
        self.of_data.add(node)

    def computed_of_data(self, node: fx.Node) -> bool:
        """Return whether Python computes the node from data-dependent numbers alone.

        These nodes are kept: sympy reorders arithmetic, and reordered floats round differently.
        """
        return bool(node.all_input_nodes) and self.of_data.issuperset(node.all_input_nodes)

    def _compute(self, expr: sympy.Basic, user: fx.Node) -> fx.Node:
        tracer = fx.proxy.GraphAppendingTracer(self.graph)
        before = user.prev
        with self.graph.inserting_before(user):
            env = {s: fx.Proxy(self.nodes[s], tracer) for s in expr.free_symbols}
            result: fx.Node = interpret_sympy(expr, env).node
        while before.next is not user:
            before = before.next
            meta(before).type = ScalarType(_step_value(before, expr))
        meta(result).type = ScalarType(expr)
        return result


def _step_value(node: fx.Node, full: sympy.Basic) -> sympy.Basic:
    """Return the value of one step in the computation of `full`.

    This is `full` itself if Python has no operator for the step."""
    operands = fx.map_arg(node.args, lambda n: getattr(meta(n).type, "expr", full))
    if node.target is torch.sym_float:
        return operands[0]
    python = getattr(operator, target_text(node.target), None)
    return full if python is None else python(*operands)


def _localize_call(node: fx.Node, sizes: _Sizes, entered: dict[fx.Node, fx.Node], parts: _Parts) -> None:
    known = meta(node)
    if node.target in redistributions.REDISTRIBUTIONS or not isinstance(node.target, OpOverload):
        _give(node, *_global_sizes((node.args, node.kwargs), node, sizes))
        if (along := axis_along(node)) is not None and is_born(along):
            local = node.target in redistributions.LOCAL
            found = (sizes.exchanged.to_shard if local else sizes.exchanged.to_gather)(along, node)
            node.kwargs = {**node.kwargs, "sizes": found}
            known.operands += (R,) * (len(tensor_operands(node)) - len(known.operands))
        return
    if not _has_sizes(node) and known.rewrite is None:
        return
    op, sources = op_view(node, lambda index, source: Operand(index, tensor_type(source)))
    outputs = known.placement if isinstance(known.placement, tuple) else (known.placement,)
    alternative = Alternative(known.operands, outputs, known.rewrite)
    args, kwargs = localized(op, alternative)
    target = local_target(op, alternative)
    target = _REGROUP.get(target, target)
    if target is not node.target:
        node.target = target

    def made(value: Any) -> Any:
        if isinstance(value, MinusOffset):
            source = sources[value.operand.index]
            return own_numbers(source, entered) or _minus_offset(source, node, sizes.of(value.offset, node))
        if isinstance(value, OwnColumns):
            source, along = sources[value.operand.index], value.axis
            start, size = sizes.of(along.offset, node), sizes.of(along.local, node)
            end = sizes.of(along.offset + along.local, node)
            return own_part(source, [value.dim], node, OwnRange(start, end, size, parts))
        if isinstance(value, Operand):
            return sources[value.index]
        if isinstance(value, tuple):
            return [made(v) for v in value]
        return sizes.of(value, node)

    _give(node, tuple(map(made, args)), {k: made(v) for k, v in kwargs.items()})


def _give(node: fx.Node, args: Any, kwargs: Any) -> None:
    """Assign changed arguments to a node; unchanged ones not, as fx updates its tables each time."""
    if args != node.args:
        node.args = args
    if kwargs != node.kwargs:
        node.kwargs = kwargs


def _has_sizes(node: fx.Node) -> bool:
    return node.target in SIZE_ARGUMENT or any(
        isinstance(meta(source).type, ScalarType) for source in node.all_input_nodes
    )


def _global_sizes(arguments: Any, user: fx.Node, sizes: _Sizes) -> Any:
    """Replace every captured SymInt by a node computed from the program's own sizes; keep tensors."""

    def global_size(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return sizes.of(argument, user)
        type_ = meta(argument).type
        return sizes.of(type_.expr, user) if isinstance(type_, ScalarType) else argument

    return fx.node.map_aggregate(arguments, global_size)


def _minus_offset(source: fx.Node, user: fx.Node, offset: fx.Node | int) -> fx.Node:
    with user.graph.inserting_before(user):
        made = user.graph.call_function(torch.ops.aten.sub.Tensor, (source, offset))
    placement = meta(source).placement
    copy_meta(
        source,
        made,
        spec=None,
        operands=(placement,),
        location=meta(user).location,
        backward=meta(user).backward,
    )
    return made


_Parts: TypeAlias = "dict[tuple[fx.Node, tuple[int, ...]], fx.Node]"
_MemoryFormat: TypeAlias = "dict[tuple[OpOverload, tuple[fx.Node, ...]], fx.Node]"


def _lay_operands(node: fx.Node, laid: _MemoryFormat) -> None:
    """Give operands the strides that a kernel depends on; an operand that has these already is not copied."""

    def lay(how: OpOverload, *values: fx.Node) -> fx.Node:
        key = how, values
        if key not in laid:  # shared with the backward: eager keeps the operand for it, too
            with node.graph.inserting_before(node):
                laid[key] = made = node.graph.call_function(how, values)
            read = tuple(meta(value).placement for value in values)
            copy_meta(values[0], made, spec=None, operands=read, location=meta(node).location)
            meta(made).backward = meta(node).backward
        return laid[key]

    node.args, node.kwargs = lay_out(node.target, node.args, node.kwargs, lay)  # type: ignore[arg-type]


_REGROUP = {
    # gathered and sliced values have strides for which a view might be impossible
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}


@dataclass(frozen=True)
class LocalizeShapes:
    """Replace global sizes by this rank's, computed from the size inputs `B`, `b`, `offset` (and `s0`, ...).

    before: `%view: f32[B*16, 8] {dp=S(0)} = aten.view(%x, [%mul, 8])`
    after:  `%view: f32[B*16, 8] {dp=S(0)} = aten.view(%x, [%mul_1, 8])` with `%mul_1 = mul(%b, 16)`

    Types on the binders stay global; the rank's shape follows from the placement. The text is the same on
    every rank; only the values of the size inputs differ. Operands of a kernel that depends on strides get
    these strides first (`fxdp/ir/ops/layouts.py`), because a local shard may differ in strides from the full
    value.
    """

    symbols: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    points: tuple[str | None, ...] = ()

    name = "localize-shapes"
    requires = Level.EXPLICIT
    ensures = Level.LOCAL

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        gather_tangents_later(gm.graph)
        nodes = list(gm.graph.nodes)
        sizes = _Sizes(gm.graph, mesh.size)
        sizes.add_axes(["", *self.axes])
        sizes.add_specs({name: named_size(name) for name in self.symbols})
        entered = enter(gm.graph, sizes.nodes, self.points) if mesh.size > 1 else {}
        captured: list[fx.Node] = []
        parts: _Parts = {}
        laid: _MemoryFormat = {}
        for node in nodes:
            if is_host_size(node) and not sizes.computed_of_data(node):
                captured.append(node)
                continue
            if isinstance(meta(node).type, ScalarType):  # a number read from data, say by `.item()`
                sizes.keep(node)
            if node.op == "call_function":
                _localize_call(node, sizes, entered, parts)
                if node.target in READ_AS_THEY_LIE:
                    _lay_operands(node, laid)
                sizes.read_from(node)
        for node in reversed(captured):
            gm.graph.erase_node(node)
        unread = dict.fromkeys([*entered, *(source for source, _ in parts)])
        for node in reversed(gm.graph.nodes):
            if node in unread and not node.users:
                gm.graph.erase_node(node)
        return gm
