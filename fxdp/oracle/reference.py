"""Run the captured graph on the global batch on one device, one node at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
from torch import fx

from fxdp.ir.graph.graphs import attribute_of, results_of
from fxdp.ir.graph.metadata import is_host_size, meta
from fxdp.ir.graph.signature import InputSpec, OutputSpec
from fxdp.ir.op_kinds import is_unwritten
from fxdp.ir.ops.empty_parts import UNWARNED
from fxdp.ir.ops.layouts import arguments_in_format
from fxdp.ir.types.sizes import axis, by_axis, number
from fxdp.ir.types.value_types import ScalarType, TensorType
from fxdp.torch_compat import OpOverload, aten

_POISON = float("nan")
_RUN_AS: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    **UNWARNED,
}
"""Replacements for ops: the strides of a real tensor may differ from the traced strides, so a view becomes a
reshape, as in a rank's program; and no rank warns about the variance of an empty part.
"""


class Reference:
    """Interpreter of a CAPTURED graph that keeps the value of every node by name."""

    def __init__(self, gm: fx.GraphModule, split: Sequence[int], symbols: Mapping[str, int]) -> None:
        self._gm = gm
        self._nodes = {node.name: node for node in gm.graph.nodes}
        totals = {axis(name).total.name: sum(sizes) for name, sizes in by_axis(split).items()}
        self.sizes: dict[str, int] = {**totals, **symbols}
        """The values of all size symbols by name; data-dependent sizes are added as values have them."""
        self.values: dict[str, Any] = {}

    def node(self, like: fx.Node) -> fx.Node | None:
        """Return the captured node from which a node of the rank's program was made, or None."""
        found = self._nodes.get(like.name)
        same = found is not None and type(meta(found).type) is type(meta(like).type)
        return found if same else None  # inserted nodes may reuse the names of erased sizes

    def run(self, specs: Mapping[InputSpec, Any]) -> dict[OutputSpec, Any]:
        """Compute all results from the values of the inputs."""
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
        """Return the value of a host number or of a node; a node without a counterpart on ranks is computed.

        A rank's program lacks a node if a pass split several results into separate nodes or removed the node.
        """
        type_ = meta(node).type
        if isinstance(type_, ScalarType) and node.name not in self.values:
            return number(type_.expr, self.sizes)
        if node.name not in self.values and node.op == "call_function":
            self.execute(node)
        return self.values[node.name]

    def _learn(self, type_: Any, full: Any) -> None:
        """Record the values of data-dependent sizes from the first value with these sizes."""
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
    """Run one op, and fill memory that the op leaves unwritten with nan: no result may rely on the values."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    if isinstance(node.target, OpOverload):
        args, kwargs = arguments_in_format(node.target, args, kwargs)
    result = _RUN_AS.get(node.target, node.target)(*args, **kwargs)
    if is_unwritten(node.target):
        result.fill_(_POISON if result.is_floating_point() or result.is_complex() else 1)
    return result
