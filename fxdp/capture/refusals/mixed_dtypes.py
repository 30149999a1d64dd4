"""Refuse products of values of two dtypes, as of float64 inputs and float32 weights, like eager code.

A trace runs no kernels, so the error would only occur at the first step, in the middle of the program.
"""

from __future__ import annotations

from torch import fx

from fxdp.capture.locations import Origin
from fxdp.errors import InputError
from fxdp.ir.graph.graphs import inputs_of
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Input
from fxdp.ir.types.value_types import TensorType, dtype_name
from fxdp.torch_compat import aten

_PRODUCTS = frozenset({
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.mv.default,
    aten.dot.default, aten.convolution.default, aten.linear.default,
})  # fmt: skip


def check_dtypes(graph: fx.Graph) -> None:
    """Raise if a graph's forward multiplies values of several dtypes.

    Raises
    ------
    InputError : with the lines, the dtypes of operands, and the dtypes of the inputs.
    """
    found = [node for node in graph.nodes if node.target in _PRODUCTS and not meta(node).backward]
    mixed = {node: dtypes for node in found if len(dtypes := _dtypes(node)) > 1}
    if not mixed:
        return
    origin = Origin.here()
    lines = dict.fromkeys(f"{', '.join(d)} at {origin.of(meta(node).location)}" for node, d in mixed.items())
    listing = "\n  ".join(lines)
    raise InputError(
        f"values of different dtypes are multiplied:\n  {listing}\nThe inputs are {_inputs(graph)}. Expected "
        "one dtype: convert the inputs, as with x.to(torch.float32), or the model, before it is compiled"
    )


def _dtypes(node: fx.Node) -> tuple[str, ...]:
    types = (meta(operand).type for operand in node.all_input_nodes)
    return tuple(dict.fromkeys(dtype_name(t.dtype) for t in types if isinstance(t, TensorType)))


def _inputs(graph: fx.Graph) -> str:
    named = []
    for spec, node in inputs_of(graph, Input):
        type_ = meta(node).type
        if isinstance(type_, TensorType):
            named.append(f"{spec.path or node.name} {dtype_name(type_.dtype)}")
    return ", ".join(named)
