"""Estimate a node's cost from shapes: floating-point operations if they dominate, else memory traffic.

The estimate compares parts of one model (stages), and does not predict seconds. Symbolic sizes count as
`symbols.hint` says. Closed forms:

| op | floating-point operations (a multiplication and an addition are two) |
|---|---|
| a product `[.., m, k] @ [.., k, n]` | `2 m k n` per batch |
| convolution | `2 * elements of the output * elements of the weight per output channel` |
| backward of a convolution | the same for each requested gradient of input and weight |
| attention, q `[.., s, d]`, k and v `[.., t, d]` | `2 s t (d + d_v)` per head |
| backward of attention | `2 s t (3 d + 2 d_v)`: scores again, and gradients of q, k, v and the weights |
| a recurrent layer | `2 * rows * elements of the weights`; twice that backward |
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

from torch import fx

from fxdp.ir.graph.graphs import argument, given_arguments
from fxdp.ir.graph.metadata import meta, tensor_operands, value_bytes
from fxdp.ir.op_kinds import picks
from fxdp.ir.types.sizes import hint
from fxdp.ir.types.value_types import ScalarType, TensorType
from fxdp.torch_compat import OpOverload

_FLOPS_PER_BYTE = 16.0
"""Operations that a device does in the time of moving one byte; between a CPU core (about 5) and a GPU."""

_PRODUCTS = frozenset({"mm", "_int_mm", "bmm", "mv", "dot", "vdot"})
_BIASED = frozenset({"addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"})
_CONVOLUTIONS = frozenset({"convolution", "_convolution", "convolution_overrideable"})
_RECURRENT = frozenset({"mkldnn_rnn_layer", "_cudnn_rnn"})
_ATTENTION = re.compile(r"_?(scaled_dot_product|flash|efficient)_\w*attention\w*")
_BY_POSITION = re.compile(r"_(flash|efficient)_attention_\w+")
_MOVES_NOTHING = frozenset({"_unsafe_view", "empty", "empty_strided", "new_empty", "new_empty_strided"})


def node_cost(node: fx.Node, batch: int = 64, flops_per_byte: float = _FLOPS_PER_BYTE) -> float:
    """Return the node's time in floating-point operations: the maximum of operations and memory traffic."""
    return max(float(node_flops(node, batch)), node_bytes(node, batch) * flops_per_byte)


def node_flops(node: fx.Node, batch: int = 64) -> int:
    """Return the operations of products, convolutions, attention and recurrent layers; else 0."""
    name = _op_name(node)
    if name in _PRODUCTS or name in _BIASED:
        left, right = (_shape(operand, batch) for operand in tensor_operands(node)[-2:])
        return 2 * prod(left) * (right[-1] if len(right) > 1 else 1)
    if name in _CONVOLUTIONS:
        return _convolution(node, batch, _shape(node, batch))
    if name == "convolution_backward":
        wanted = sum(map(bool, argument(node, "output_mask")[:2]))
        return wanted * _convolution(node, batch, _shape(argument(node, "grad_output"), batch))
    if _ATTENTION.fullmatch(name):
        return _attention(node, name, batch)
    if name.removesuffix("_backward") in _RECURRENT:
        return _recurrent(node, batch) * (2 if name.endswith("_backward") else 1)
    return 0


def node_bytes(node: fx.Node, batch: int = 64) -> int:
    """Return the bytes that the node reads and writes; 0 for inputs, views and sizes."""
    name = _op_name(node)
    if not name or name in _MOVES_NOTHING or getattr(node.target, "is_view", False):
        return 0
    written = value_bytes(node, batch)
    operands = list(dict.fromkeys(tensor_operands(node)))
    if name.endswith("_like") or name.startswith("new_"):
        operands = []
    if picks(node.target):
        return 2 * written + sum(value_bytes(operand, batch) for operand in operands[1:])
    return written + sum(value_bytes(operand, batch) for operand in operands)


def _convolution(node: fx.Node, batch: int, output: tuple[int, ...]) -> int:
    weight, x = (_shape(argument(node, name), batch) for name in ("weight", "input"))
    return 2 * prod(x if argument(node, "transposed") else output) * prod(weight[1:])


def _attention(node: fx.Node, name: str, batch: int) -> int:
    query, key, value = (_shape(argument(node, n), batch) for n in ("query", "key", "value"))
    positions = key[1] if _BY_POSITION.fullmatch(name) else key[-2]
    scores = prod(query[:-1]) * positions
    if name.endswith("_backward"):
        return 2 * scores * (3 * query[-1] + 2 * value[-1])
    return 2 * scores * (query[-1] + value[-1])


def _recurrent(node: fx.Node, batch: int) -> int:
    rows = prod(_shape(argument(node, "input"), batch)[:-1])
    weights: list[tuple[int, ...]] = []
    for name, value in given_arguments(node).items():
        if re.fullmatch(r"weight\d?", name):
            weights += [_shape(w, batch) for w in (value if isinstance(value, list | tuple) else [value])]
    return 2 * rows * sum(prod(shape) for shape in weights if len(shape) > 1)


def _op_name(node: fx.Node) -> str:
    """Return the op's name, `mm` for `aten.mm.default`; empty for a node that is no op."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return ""
    return "" if isinstance(meta(node).type, ScalarType) else str(node.target._schema.name).split("::")[-1]


def _shape(value: Any, batch: int) -> tuple[int, ...]:
    type_ = meta(value).type if isinstance(value, fx.Node) else None
    return tuple(hint(size, batch) for size in type_.shape) if isinstance(type_, TensorType) else ()
