"""What a node of a program is to the stages that the program is cut into.

free        depends on inputs, buffers and sizes alone and costs little: cloned wherever it is used
view        a view or cast of a parameter: cloned as well
forward     the rest of the forward: gets a stage by the cut
backward    the rest of the backward: gets its stage from the forward
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.draws import node_draws
from fxdp.ir.metadata import meta
from fxdp.ir.op_kinds import is_view
from fxdp.ir.signature import Buffer, Constant, Input, Parameter, Size
from fxdp.ir.sizes import LOCAL, OFFSET
from fxdp.ir.types import TensorType
from fxdp.torch_compat import aten

_HEAVY = frozenset(
    {
        aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default,
        aten.convolution.default, aten.matmul.default,
    }
)  # fmt: skip


_KEEPING = frozenset({aten._to_copy.default, redistributions.all_gather_shards, redistributions.wait})
"""What a parameter passes through and is still one."""


def input_only(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on inputs, buffers, constants and sizes alone, collectives among them.

    A random value counts where all ranks and micro-batches share it.
    """
    return _of_inputs(graph, (), lambda node: not node_draws(node) or _is_replicated(node))


def free_nodes(graph: fx.Graph, known: Iterable[fx.Node]) -> set[fx.Node]:
    """Cheap nodes that depend on inputs, sizes and the `known` values alone."""
    costly = redistributions.COLLECTIVES.union(_HEAVY)
    return _of_inputs(graph, known, lambda node: not node_draws(node) and node.target not in costly)


def _of_inputs(graph: fx.Graph, known: Iterable[fx.Node], counts: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The `known` nodes and inputs, and all nodes that `counts` which read these alone."""
    found = set(known)
    for node in graph.nodes:
        if node.op == "placeholder":
            if isinstance(meta(node).spec, (Input, Buffer, Constant, Size)):
                found.add(node)
        elif _reads_only(node, found) and counts(node):
            found.add(node)
    return found


def parameter_views(graph: fx.Graph) -> set[fx.Node]:
    """Parameters, gathered in full where they lie in rows, and their views and casts."""
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
    """Nodes whose value is the same in every micro-batch of a step: of parameters, buffers, constants alone.

    Neither random values nor sizes or parts of one micro-batch go into them.
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


def _reads_only(node: fx.Node, known: set[fx.Node]) -> bool:
    return node.op == "call_function" and all(a in known for a in node.all_input_nodes)


def _is_replicated(node: fx.Node) -> bool:
    return all(p is None or str(p) == "R" for p in meta(node).placements)
