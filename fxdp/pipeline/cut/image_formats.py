"""Find the values of a program that lie channels-last because Inductor compiles convolutions so.

A part is compiled for the strides of the values that other parts pass to it. Passed on as rows, an image
would be copied twice between two parts with convolutions:

    round 1   convolution -> channels-last | rows | channels-last -> normalize, convolution   round 2

The graph alone decides, so that all ranks, which run other parts, agree. If an op lays out its result in
another way than is found here, the result is copied, and the numbers are equal.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxdp.ir.graph.metadata import meta, tensor_operands
from fxdp.ir.types.value_types import tensor_types
from fxdp.torch_compat import OpOverload, aten

_DIMS = (4, 5)
"""Dims of a batch of pictures, and of one of volumes."""
_KEEP = frozenset(
    {
        "aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool2d_backward", "aten::avg_pool2d",
        "aten::avg_pool2d_backward", "aten::cat", "aten::clone", "aten::constant_pad_nd",
        "aten::convolution_backward", "aten::max_pool2d_with_indices",
        "aten::max_pool2d_with_indices_backward",
        "aten::native_dropout", "aten::native_group_norm", "aten::native_group_norm_backward",
        "aten::upsample_bilinear2d", "aten::upsample_bilinear2d_backward", "aten::upsample_nearest2d",
        "aten::upsample_nearest2d_backward", "fxdp::in_format", "fxdp::in_format_of",
    }
)  # fmt: skip
"""Ops beside elementwise ones whose (first) result lies as their operands do."""


def images(graph: fx.Graph) -> frozenset[str]:
    """Return the names of the values that lie channels-last: convolutions, and what keeps their format."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        shapes = [type_.shape for type_ in tensor_types(meta(node).type)[:1]]
        if any(len(shape) in _DIMS for shape in shapes) and _lies_so(node, found):
            found.add(node)
    return frozenset(node.name for node in found)


def _lies_so(node: fx.Node, found: set[fx.Node]) -> bool:
    """Return whether a value lies channels-last, if the values `found` do."""
    if node.target is operator.getitem:
        return node.args[1:] == (0,) and node.all_input_nodes[0] in found
    if not isinstance(node.target, OpOverload):
        return False
    if node.target is aten.convolution.default:
        return True
    keeps = torch.Tag.pointwise in node.target.tags or str(node.target._schema.name) in _KEEP
    return keeps and not found.isdisjoint(tensor_operands(node))
