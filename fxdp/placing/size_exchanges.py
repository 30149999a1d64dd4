"""Nodes for the sizes of axes born inside a program: what each rank reads from its own rows, and exchanges.

%index: f32[B_u0, 4] {dp=S(0)} = aten.index(%x, [%mask])
%sym_size: int(b_u0) = aten.sym_size.int(%index, 0)                    on this rank
%exchange_sizes = exchange_sizes([%sym_size])                          if more than that is read
%wait = wait(%exchange_sizes)                                          offset, total, largest, ...
%select = aten.select(%wait, 0, 1)
%total: int(B_u0) = aten._local_scalar_dense(%select)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import Cause, meta, tensor_operands, tensor_type
from fxdp.ir.ops import exchanged_sizes
from fxdp.ir.ops.library import aten
from fxdp.ir.types.born_axes import is_born
from fxdp.ir.types.placements import R, Shard
from fxdp.ir.types.sizes import Axis, axis_of
from fxdp.ir.types.sizes import axis as axis_named
from fxdp.ir.types.value_types import NodeType, ScalarType, TensorType

_Of = Callable[[Any, fx.Node], Any]
"""Returns the node of an expression, computed before a node."""


def axis_along(node: fx.Node) -> Axis | None:
    """Return the axis along which a redistribution gathers or shards rows, if it does."""
    found = redistributions.redistribution_of(node)
    if found is None or Shard not in (found.takes, found.gives):
        return None
    return axis_of(tensor_type(node).shape[node.args[1]])  # type: ignore[index]


def gather_tangents_later(graph: fx.Graph) -> None:
    """Move collectives of tangents with rows of an axis born inside behind the forward, which tells sizes."""
    for tangent in graph.find_nodes(op="placeholder"):
        for node in list(tangent.users):
            if node.target in redistributions.COLLECTIVES and is_born(axis_along(node) or axis_named()):
                next(iter(node.users)).prepend(node)


class ExchangedSizes:
    """The exchanges of sizes in one program, at most one for each axis."""

    def __init__(self, ranks: int, of: _Of) -> None:
        self._ranks, self._of = ranks, of
        self._vectors: dict[str, fx.Node] = {}

    def number(self, symbol: sympy.Symbol, user: fx.Node) -> fx.Node:
        """Return the global size or the offset of an axis, read before a node."""
        kind, _, name = symbol.name.partition("_")
        return self._read(axis_named(name), {"offset": 0, "B": 1}[kind], symbol, user)

    def to_shard(self, of: Axis, user: fx.Node) -> dict[str, fx.Node]:
        """Return the sizes, by name, with which a rank takes its part of a full value."""
        if of.is_contiguous:
            known = {"offset": of.offset, "b": of.local}
            return {name: self._of(symbol, user) for name, symbol in known.items()}
        local = [self._of(axis_named(part).local, user) for part in of.parts]
        type_ = TensorType(torch.int64, (of.total,))
        rows = self._call(exchanged_sizes.own_rows, (self._vector(of, user), local), type_, user)
        return {"own_rows": rows}

    def to_gather(self, of: Axis, user: fx.Node) -> dict[str, fx.Node]:
        """Return the sizes, by name, with which ranks gather padded parts, or scatter a sum into these."""
        parts, total = len(of.parts), self._of(of.total, user)
        type_ = TensorType(torch.int64, (of.total,))
        return {
            "b": self._of(of.local, user),
            "largest": self._read(of, 2 * parts, sympy.Symbol(of.largest, integer=True), user),
            "rows": self._call(
                exchanged_sizes.gathered_rows, (self._vector(of, user), parts, total), type_, user
            ),
        }

    def _vector(self, of: Axis, user: fx.Node) -> fx.Node:
        if of.name not in self._vectors:
            local = [self._of(axis_named(part).local, user) for part in of.parts]
            size = 2 * len(local) + 1 + self._ranks * len(local)
            type_ = TensorType(torch.int64, (size,))
            pending = self._call(redistributions.exchange_sizes, (local,), type_, user)
            meta(pending).cause = Cause(user.name, local[0].name, meta(user).location, "rows of each rank")
            self._vectors[of.name] = self._call(redistributions.wait, (pending,), type_, user)
        return self._vectors[of.name]

    def _read(self, of: Axis, place: int, symbol: sympy.Symbol, user: fx.Node) -> fx.Node:
        one = TensorType(torch.int64, ())
        selected = self._call(aten.select.int, (self._vector(of, user), 0, place), one, user)
        return self._call(aten._local_scalar_dense.default, (selected,), ScalarType(symbol), user)

    def _call(self, target: Any, args: tuple[Any, ...], type_: NodeType, user: fx.Node) -> fx.Node:
        with user.graph.inserting_before(user):
            made = user.graph.call_function(target, args)
        known = meta(made)
        known.type, known.location, known.backward = type_, meta(user).location, meta(user).backward
        known.placement, known.operands = R, (R,) * len(tensor_operands(made))
        return made
