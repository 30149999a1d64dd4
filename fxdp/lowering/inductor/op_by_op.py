"""The code of what runs op by op between segments, and sums that pack their own operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from fxdp.ir.op_kinds import is_view
from fxdp.ir.ops.packed_sums import start_sum
from fxdp.lowering.halves import Boxed
from fxdp.torch_compat import boxed_code, graph_module

_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
_CAT = torch.ops.aten.cat.default


def op_by_op(gm: fx.GraphModule) -> Boxed:
    """A function of one list, which it empties, that computes what a graph says; the graph stays as it is."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    pack_sums(graph)
    return boxed_code(graph_module(gm, graph, "OpByOp"))


def pack_sums(graph: fx.Graph, wanted: Callable[[fx.Node], bool] = lambda packed: True) -> bool:
    """Sum what is laid end to end for nothing else without a copy in between; whether anything has changed.

    before: `%all_reduce = all_reduce(cat([%a, %b]), sum, group)`
    after:  `%start_sum = start_sum([%a, %b], group)`
    """
    found = False
    for node in graph.find_nodes(op="call_function", target=_ALL_REDUCE):
        value, kind, group = node.args
        if kind != "sum" or value.target is not _CAT or len(value.users) > 1 or len(value.args) > 1:
            continue
        if not wanted(value):
            continue
        found = True
        with graph.inserting_before(node):
            packed = graph.call_function(start_sum, (value.args[0], group))
        if (like := node.meta.get("val")) is not None:
            packed.meta["val"] = like
        node.replace_all_uses_with(packed)
        graph.erase_node(node)
        graph.erase_node(value)
    return found


def reads_again(packed: fx.Node) -> bool:
    """Whether something else reads one of the values that are laid end to end.

    Inductor makes them where they are packed, and lets the sum write over that: who reads one of them later
    would find its sum.
    """
    for value in packed.all_input_nodes:
        path = packed
        while value.op == "call_function":
            if any(user is not path for user in value.users):
                return True
            if not is_view(value.target):
                break
            path, value = value, value.all_input_nodes[0]
    return False
