"""Roles of a program's nodes in a cut into stages.

free        depends only on inputs, buffers and sizes, and costs little: cloned into every part that reads it
view        a view or cast of a parameter: cloned as well
forward     the rest of the forward: gets a stage by the cut
backward    the rest of the backward: gets the stage of the forward op
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.draws import node_draws
from fxdp.ir.graph.metadata import meta, value_bytes
from fxdp.ir.graph.signature import Buffer, Constant, Input, Parameter, Size
from fxdp.ir.op_kinds import is_view
from fxdp.ir.types.sizes import LOCAL, OFFSET
from fxdp.ir.types.value_types import ScalarType, TensorType
from fxdp.torch_compat import aten

_HEAVY = frozenset(
    {
        aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default,
        aten.convolution.default, aten.matmul.default,
    }
)  # fmt: skip


_KEEPING = frozenset({aten._to_copy.default, redistributions.all_gather_shards, redistributions.wait})
"""Ops that map a parameter to the same parameter in a different form."""


def input_only(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on inputs, buffers, constants and sizes alone, including collectives.

    A random value counts if shared by all ranks and micro-batches.
    """
    return _of_inputs(graph, (), lambda node: not node_draws(node) or _is_replicated(node))


def free_nodes(graph: fx.Graph, known: Iterable[fx.Node]) -> set[fx.Node]:
    """Return cheap nodes that depend on inputs, sizes and the `known` values alone."""
    costly = redistributions.COLLECTIVES.union(_HEAVY)
    return _of_inputs(graph, known, lambda node: not node_draws(node) and node.target not in costly)


def heavy_before(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the costly ops that these nodes depend on, which whoever computes these must compute, too."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return {node for node in found if node.target in _HEAVY}


def _of_inputs(graph: fx.Graph, known: Iterable[fx.Node], counts: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Return the `known` nodes, inputs, and all nodes accepted by `counts` that read only these."""
    found = set(known)
    for node in graph.nodes:
        if node.op == "placeholder":
            if isinstance(meta(node).spec, (Input, Buffer, Constant, Size)):
                found.add(node)
        elif _reads_only(node, found) and counts(node):
            found.add(node)
    return found


def parameter_views(graph: fx.Graph) -> set[fx.Node]:
    """Return parameters (sharded ones after the all-gather) with their views and casts."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(meta(node).spec, Parameter):
            found.add(node)
        elif is_view(node.target) or node.target in _KEEPING:
            tensors = [a for a in node.all_input_nodes if isinstance(meta(a).type, TensorType)]
            if tensors and all(a in found for a in tensors):
                found.add(node)
    return found


def same_in_all(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes with equal values in all micro-batches of a step.

    These depend on parameters, buffers and constants. Neither random values nor sizes or samples of one
    micro-batch contribute to these nodes.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if not _is_replicated(node):
            continue
        if node.op == "placeholder":
            match meta(node).spec:
                case Parameter() | Buffer() | Constant():
                    found.add(node)
                case Size(name) if name not in (LOCAL.name, OFFSET.name):
                    found.add(node)
        elif (
            _reads_only(node, found)
            and not node_draws(node)
            and node.target not in redistributions.REDISTRIBUTIONS
        ):
            found.add(node)
    return found


def is_cheap_view(node: fx.Node) -> bool:
    """Return whether any part can compute the view from a base that is no larger."""
    if not is_view(node.target):
        return False
    base = node.all_input_nodes[0]
    return value_bytes(base) <= value_bytes(node) and meta(base).placement is not None


def is_number(node: fx.Node) -> bool:
    """Return whether a node is a size, which each part reads from the tensor itself."""
    return isinstance(meta(node).type, ScalarType)


def _reads_only(node: fx.Node, known: set[fx.Node]) -> bool:
    return node.op == "call_function" and all(a in known for a in node.all_input_nodes)


def _is_replicated(node: fx.Node) -> bool:
    return all(p is None or str(p) == "R" for p in meta(node).placements)
