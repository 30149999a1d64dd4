"""Canonical order of the nodes of a captured graph, determined by the graph's edges alone.

A model's code may iterate over a set, and the order of a set differs between processes:

    for kind in set(config.layer_types):                 rank 0              rank 1
        tables[kind] = self.rope(x, kind)                %full = ...         %sliding = ...
                                                         %sliding = ...      %full = ...

Both ranks have captured the same model, but with different names of nodes and a different order of buffers.
The canonical order is only used for ranks that differ (`SamePrograms`): all other programs keep the order of
the code.

    results, gradients from the last parameter's to the first's
       | depth first, operands in their order           nodes that the loss needs, then the backward
    nodes, each after its operands                       forward before backward
    random ops and writes                                among each other in the order of the code
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from fxdp.capture.captured import Captured
from fxdp.ir.graph.draws import node_draws
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import copy_meta, meta
from fxdp.ir.graph.signature import Buffer, Gradient, Mutation
from fxdp.torch_compat import graph_module


def in_one_order(found: Captured) -> Captured:
    """Return a copy of the capture with nodes ordered and named by the graph's edges alone."""
    old = found.gm.graph
    new, made = fx.Graph(), dict[fx.Node, fx.Node]()
    placeholders = _by_name(old.find_nodes(op="placeholder"))
    for node in [*placeholders, *_ordered(old)]:
        # fx numbers names anew, in the order of creation
        name = node.name if node.op == "placeholder" else re.sub(r"(_\d+)+$", "", node.name)
        args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
        made[node] = new.create_node(node.op, node.target, args, kwargs, name)
    results = _sorted_results(old)
    made[old.output_node()] = new.output(tuple(value and made[value] for _, value in results))
    for node, copy in made.items():
        copy.meta.update(node.meta)
        copy_meta(node, copy)
    meta(new.output_node()).results = tuple(spec for spec, _ in results)
    return replace(found, gm=graph_module(found.gm, new))


def _by_name(placeholders: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the inputs of a program; the positions of buffers are filled by name."""
    nodes = list(placeholders)
    buffers = sorted((n for n in nodes if isinstance(meta(n).spec, Buffer)), key=lambda n: meta(n).spec.name)  # type: ignore[union-attr]
    return [buffers.pop(0) if isinstance(meta(n).spec, Buffer) else n for n in nodes]


def _sorted_results(graph: fx.Graph) -> list[tuple[Any, fx.Node | None]]:
    """Return pairs of output spec and node; the positions of buffers' new values are filled by name."""
    results = results_of(graph)
    written = sorted((r for r in results if _is_of_buffer(r[0])), key=lambda result: result[0].of.name)
    return [written.pop(0) if _is_of_buffer(result[0]) else result for result in results]


def _is_of_buffer(spec: object) -> bool:
    return isinstance(spec, Mutation) and isinstance(spec.of, Buffer)


def _ordered(graph: fx.Graph) -> list[fx.Node]:
    results = _sorted_results(graph)
    first = [value for spec, value in results if not isinstance(spec, Gradient)]
    gradients = [value for spec, value in results if isinstance(spec, Gradient)]
    found = list(_depth_first([*first, *reversed(gradients)], graph))
    return [n for n in found if not meta(n).backward] + [n for n in found if meta(n).backward]


def _depth_first(roots: Iterable[fx.Node | None], graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield nodes after their operands; nodes with side effects also stay in their order."""
    effects = [n for n in graph.nodes if n.op == "call_function" and (n.is_impure() or node_draws(n))]
    before = dict(zip(effects[1:], effects, strict=False))
    seen: set[fx.Node] = set()
    for root in (*filter(None, roots), *effects):
        stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if ready:
                yield node
            elif node not in seen and node.op != "placeholder":
                seen.add(node)
                needs = [*node.all_input_nodes, *([before[node]] if node in before else [])]
                stack.append((node, True))
                stack += [(needed, False) for needed in reversed(needs)]
