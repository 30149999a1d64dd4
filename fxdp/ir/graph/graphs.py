"""Basic queries and edits of graphs: copies, ancestors and users of a node, arguments by name."""

from __future__ import annotations

import contextlib
import gc
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import fx

from fxdp.ir.graph.metadata import copy_meta, meta
from fxdp.torch_compat import OpOverload, graph_module

_T = TypeVar("_T")


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph module with separate nodes and metadata."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, mapping)
    output = graph.output(result)
    mapping[gm.graph.output_node()] = output
    for old, new in mapping.items():
        # separate metadata: with a shared object, a pass on the copy would change the original
        new.meta.update(old.meta)  # to assign `meta`, torch looks the node up in its table of nodes, twice
        copy_meta(old, new)
    return graph_module(gm, graph)


def subgraph(
    gm: fx.GraphModule, nodes: Collection[fx.Node], results: Iterable[fx.Node | None], name: str,
    inputs: Iterable[fx.Node] = (),
) -> fx.GraphModule:  # fmt: skip
    """Return a graph of copies of these nodes, which takes `inputs` first and returns `results`."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = made = graph.placeholder(node.name)
        made.meta.update(node.meta)
    for node in gm.graph.nodes:
        if node in nodes and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(None if n is None else copies[n] for n in results))
    return graph_module(gm, graph, name)


def ancestors(roots: Iterable[fx.Node | None]) -> set[fx.Node]:
    """Return the roots and all nodes that they depend on; None, an absent result, is no root."""
    return spread((root for root in roots if root is not None), lambda node: node.all_input_nodes)


def reachable(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the roots and all nodes that depend on a root, including the output node."""
    return spread(roots, lambda node: node.users)


def spread(roots: Iterable[_T], beside: Callable[[_T], Iterable[_T]]) -> set[_T]:
    """Return the transitive closure of the roots under `beside`."""
    pending = list(roots)
    found = set(pending)
    while pending:
        new = [node for node in beside(pending.pop()) if node not in found]
        found.update(new)
        pending += new
    return found


def erase_unused(graph: fx.Graph) -> None:
    """Erase calls without users and without side effects."""
    # from the end, so that operands of erased calls are erased, too
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            graph.erase_node(node)


def keep_ancestors(graph: fx.Graph, also: Iterable[fx.Node] = ()) -> None:
    """Erase nodes, even collectives, on which neither a result nor one of `also` depends; keep inputs."""
    needed = ancestors([graph.output_node(), *also])
    for node in reversed(list(graph.nodes)):
        if node not in needed and node.op != "placeholder":
            graph.erase_node(node)


def inputs_of(graph: fx.Graph, kind: type[_T]) -> list[tuple[_T, fx.Node]]:
    """Return pairs of spec and node for the inputs with specs of this kind."""
    found = ((meta(node).spec, node) for node in graph.find_nodes(op="placeholder"))
    return [(spec, node) for spec, node in found if isinstance(spec, kind)]


def results_of(graph: fx.Graph) -> list[tuple[Any, fx.Node]]:
    """Return pairs of output spec and node."""
    output = graph.output_node()
    return list(zip(meta(output).results, output.args[0], strict=True))  # type: ignore[arg-type]


def attribute_of(gm: fx.GraphModule, node: fx.Node) -> Any:
    """Return the attribute that a `get_attr` node names."""
    return operator.attrgetter(str(node.target))(gm)


def given_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the explicit arguments of an op's node, by their names in the op's schema."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def written_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands into which an op writes, by its schema."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    given = given_arguments(node)
    values = [given.get(a.name) for a in node.target._schema.arguments if a.is_write]
    listed = (one for value in values for one in (value if isinstance(value, (list, tuple)) else [value]))
    return [one for one in listed if isinstance(one, fx.Node)]


def argument(node: fx.Node, name: str) -> Any:
    """Return a node's argument by name, or the default; None if the op has no such argument."""
    return argument_of(node.target, name, node.args, node.kwargs)


def argument_of(target: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a call's argument by name, or the default; None if the op has no such argument."""
    for position, known in enumerate(target._schema.arguments):
        if known.name == name:
            return args[position] if position < len(args) else kwargs.get(name, known.default_value)
    return None


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disable Python's garbage collection in a block: tracing and passes create a million long-lived objects.

    A full collection traverses all of these, and everything that a model has in memory, again and again: a
    fifth of the time of a trace, and more than the passes themselves take.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:  # if it was disabled before, leave it so
            gc.enable()
