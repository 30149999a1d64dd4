"""What one device computes: the captured graph run on the global batch, one node at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
from torch import fx

from fxdp.ir.graphs import attribute_of, results_of
from fxdp.ir.metadata import is_host_size, meta
from fxdp.ir.op_kinds import is_unwritten
from fxdp.ir.ops.empty_parts import UNWARNED
from fxdp.ir.ops.layouts import arguments_in_format
from fxdp.ir.signature import InputSpec, OutputSpec
from fxdp.ir.sizes import B, number
from fxdp.ir.types import ScalarType, TensorType
from fxdp.torch_compat import OpOverload, aten

_POISON = float("nan")
_RUN_AS: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    **UNWARNED,
}
"""A real tensor's strides may be others than those it was traced with: a rank's program reshapes, too, and
no rank warns of spreads of an empty part."""


class Reference:
    """Interprets a CAPTURED graph; every node's value is kept under the node's name."""

    def __init__(self, gm: fx.GraphModule, batch: int, symbols: Mapping[str, int]) -> None:
        self._gm = gm
        self._nodes = {node.name: node for node in gm.graph.nodes}
        self.sizes: dict[str, int] = {B.name: batch, **symbols}
        """The values of all size symbols by name; those that only the data fixes join as they are met."""
        self.values: dict[str, Any] = {}

    def node(self, like: fx.Node) -> fx.Node | None:
        """The captured node that a node of the rank's program came from."""
        found = self._nodes.get(like.name)
        same = found is not None and type(meta(found).type) is type(meta(like).type)
        return found if same else None  # names of erased sizes are given again to inserted nodes

    def run(self, specs: Mapping[InputSpec, Any]) -> dict[OutputSpec, Any]:
        """All results, from the value of each slot."""
        for node in self._gm.graph.nodes:
            known = meta(node)
            if node.op == "placeholder":
                if known.spec is not None and known.spec in specs:
                    self.values[node.name] = specs[known.spec]
            elif node.op == "get_attr":
                self.values[node.name] = attribute_of(self._gm, node)
            elif node.op == "call_function" and not is_host_size(node):
                self.execute(node)
        return {spec: self.value(node) for spec, node in results_of(self._gm.graph) if spec is not None}

    def execute(self, node: fx.Node) -> Any:
        """Run one node on full values and keep the result."""
        value = self.values[node.name] = execute(node, self.value)
        self._learn(meta(node).type, value)
        return value

    def value(self, node: fx.Node) -> Any:
        """The value of a host number, or of a node; it is run now if the ranks' program has none like it.

        That makes several results each by itself, or a pass has found the node unused.
        """
        type_ = meta(node).type
        if isinstance(type_, ScalarType) and node.name not in self.values:
            return number(type_.expr, self.sizes)
        if node.name not in self.values and node.op == "call_function":
            self.execute(node)
        return self.values[node.name]

    def _learn(self, type_: Any, full: Any) -> None:
        """The values of sizes that only the data fixes, from the first value that has them."""
        if isinstance(type_, tuple):
            for one, value in zip(type_, full, strict=True):
                self._learn(one, value)
        elif isinstance(type_, TensorType):
            for size, value in zip(type_.shape, full.shape, strict=True):
                if isinstance(size, sympy.Symbol):
                    self.sizes.setdefault(size.name, value)
        elif isinstance(type_, ScalarType) and isinstance(type_.expr, sympy.Symbol):
            self.sizes.setdefault(type_.expr.name, full)


def execute(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Run one op; memory that it leaves unwritten is poisoned, so that nobody can rely on it."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    if isinstance(node.target, OpOverload):
        args, kwargs = arguments_in_format(node.target, args, kwargs)
    result = _RUN_AS.get(node.target, node.target)(*args, **kwargs)
    if is_unwritten(node.target):
        result.fill_(_POISON if result.is_floating_point() or result.is_complex() else 1)
    return result
