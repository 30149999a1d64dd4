"""Leave out of a backward graph what only zeros would flow through.

Autograd says nothing for outputs that the loss does not use (the logits beside the loss): their tangents are
zero. Where such a zero only meets linear ops and sums, it is removed from the graph, so that nothing is
computed for it; a tangent that reaches any other op stays, and gets zeros at run time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from fxdp.ir.notes import note
from fxdp.ir.op_kinds import keeps_zeros
from fxdp.ir.types import TensorType
from fxdp.torch_compat import graph_module

aten = torch.ops.aten

def usual_zeros(tangents: Sequence[TensorType]) -> frozenset[int]:
    """The tangents that a training loop leaves zero: all but the scalars', where there is a scalar."""
    if all(t.shape for t in tangents):
        return frozenset()
    return frozenset(i for i, t in enumerate(tangents) if t.shape)


def without_tangents(
    gm: fx.GraphModule, zero: Sequence[int], tangents: int
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """The backward without the tangents numbered `zero`, and the numbers of those it still takes.

    The last `tangents` placeholders of `gm` are its tangents.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    names = [n.name for n in placeholders[len(placeholders) - tangents :]]
    graph, dropped = gm.graph, []
    for number in zero:
        pruned = _without_one(graph, names[number])
        if pruned is not None:
            graph = pruned
            dropped.append(number)
    kept = tuple(i for i in range(tangents) if i not in dropped)
    return graph_module(gm, graph, "Backward"), kept


def _without_one(old: fx.Graph, tangent: str) -> fx.Graph | None:
    """A copy of the graph without one tangent; None where its zeros reach an op that is not known linear."""
    graph: fx.Graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    zeros: set[fx.Node] = set()
    for node in old.nodes:
        if node.op == "placeholder" and node.name == tangent:
            zeros.add(node)
        elif not any(a in zeros for a in node.all_input_nodes):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        elif _sums(node, zeros):
            copies[node] = copies[next(a for a in node.all_input_nodes if a not in zeros)]
        elif _stays_zero(node, zeros):
            zeros.add(node)
        else:
            return None
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output") or n.is_impure())
    return graph


def _sums(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """`add(x, 0)` of x's own shape and dtype is x."""
    if node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2 or node.kwargs:
        return False
    others = [a for a in node.all_input_nodes if a not in zeros]
    return len(others) == 1 and _type(others[0]) == _type(node)


def _stays_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    if node.target is aten.add.Tensor:
        return all(a in zeros for a in node.all_input_nodes)
    # zero times a value that may be inf or nan is what autograd would compute as nan: keep to finite ops
    divides = node.target is aten.div.Tensor and node.args[1] in zeros
    return keeps_zeros(node.target) and not divides


def _type(node: fx.Node) -> object:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    known = note(node).type
    return known if isinstance(known, TensorType) else node
