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

import numpy as np
import sympy
import torch
from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import Cause, meta, tensor_operands, tensor_type
from fxdp.ir.ops import exchanged_sizes
from fxdp.ir.ops.library import aten
from fxdp.ir.types.born_axes import is_born
from fxdp.ir.types.placements import Placement, R, Shard
from fxdp.ir.types.sizes import Axis, axis_of
from fxdp.ir.types.sizes import axis as axis_named
from fxdp.ir.types.value_types import NodeType, ScalarType, TensorType

_Of = Callable[[Any, fx.Node], Any]
"""Returns the node of an expression, computed before a node."""
_ONE = TensorType(torch.int64, ())


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
        """Return the global size or the offset of an axis, or a rank's size of a run, read before a node."""
        kind, _, name = symbol.name.partition("_")
        if kind == "b":
            return self._run(name, symbol, user)
        of, place = axis_named(name), {"offset": 0, "B": 1}[kind]
        return self._read(of, place, symbol, user) if of.is_contiguous else self._total(of, symbol, user)

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

    def _run(self, name: str, symbol: sympy.Symbol, user: fx.Node) -> fx.Node:
        """Return the number of rows in one run of an axis, which the rank selects once more to know it."""
        joined, _, number = name.partition(".")
        total = axis_named(joined).total
        calls = (node for node in user.graph.nodes if node.op == "call_function")
        born = next(node for node in calls if total in getattr(meta(node).type, "shape", ()))
        row, along = tensor_operands(born)[-1], meta(born).operands[-1]
        assert isinstance(along, Shard)
        dtype, shape = tensor_type(row).dtype, tensor_type(row).shape
        for dim, place in enumerate(np.unravel_index(int(number), shape[: along.dim]), start=1):
            type_ = TensorType(dtype, shape[dim:])
            row = self._call(aten.select.int, (row, 0, int(place)), type_, user, Shard(along.dim - dim))
        type_ = TensorType(torch.int64, (axis_named(name).total, len(shape) - along.dim))
        found = self._call(aten.nonzero.default, (row,), type_, user, Shard(0))
        return self._call(aten.sym_size.int, (found, 0), ScalarType(symbol), user)

    def _total(self, of: Axis, symbol: sympy.Symbol, user: fx.Node) -> fx.Node:
        parts, several = len(of.parts), TensorType(torch.int64, (len(of.parts),))
        totals = self._call(aten.slice.Tensor, (self._vector(of, user), 0, parts, 2 * parts), several, user)
        return self._number(self._call(aten.sum.default, (totals,), _ONE, user), symbol, user)

    def _read(self, of: Axis, place: int, symbol: sympy.Symbol, user: fx.Node) -> fx.Node:
        selected = self._call(aten.select.int, (self._vector(of, user), 0, place), _ONE, user)
        return self._number(selected, symbol, user)

    def _number(self, value: fx.Node, symbol: sympy.Symbol, user: fx.Node) -> fx.Node:
        return self._call(aten._local_scalar_dense.default, (value,), ScalarType(symbol), user)

    def _call(
        self, target: Any, args: tuple[Any, ...], type_: NodeType, user: fx.Node, placement: Placement = R
    ) -> fx.Node:
        with user.graph.inserting_before(user):
            made = user.graph.call_function(target, args)
        known = meta(made)
        known.type, known.location, known.backward = type_, meta(user).location, meta(user).backward
        known.placement = placement
        known.operands = tuple(meta(n).placement for n in tensor_operands(made))  # type: ignore[misc]
        return made
