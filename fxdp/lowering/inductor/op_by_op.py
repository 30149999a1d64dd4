"""The code of what runs op by op between segments."""

from __future__ import annotations

import torch
from torch import fx

from fxdp.ir.ops.packed_sums import start_sum
from fxdp.lowering.halves import Boxed
from fxdp.torch_compat import boxed_code, graph_module

_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
_CAT = torch.ops.aten.cat.default


def op_by_op(gm: fx.GraphModule) -> Boxed:
    """A function of one list, which it empties, that computes what a graph says; the graph stays as it is."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    _pack_sums(graph)
    return boxed_code(graph_module(gm, graph, "OpByOp"))


def _pack_sums(graph: fx.Graph) -> None:
    """Sum what is laid end to end for nothing else without a copy in between.

    before: `%all_reduce = all_reduce(cat([%a, %b]), sum, group)`
    after:  `%start_sum = start_sum([%a, %b], group)`
    """
    for node in graph.find_nodes(op="call_function", target=_ALL_REDUCE):
        value, kind, group = node.args
        if kind != "sum" or value.target is not _CAT or len(value.users) > 1 or len(value.args) > 1:
            continue
        with graph.inserting_before(node):
            packed = graph.call_function(start_sum, (value.args[0], group))
        node.replace_all_uses_with(packed)
        graph.erase_node(node)
        graph.erase_node(value)
