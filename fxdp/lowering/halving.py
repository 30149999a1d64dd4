"""Cut a backward graph in two: what other stages wait for first, the gradients of weights later.

backward   %saved, %tangent -> %grad_x, %grad_w
inputs     %saved, %tangent -> %grad_x, then what the other half needs
weights    those            -> %grad_w
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxdp.ir.graphs import ancestors
from fxdp.torch_compat import graph_module, sizes_behind

aten = torch.ops.aten


def split_backward(gm: fx.GraphModule, first: Sequence[int]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two halves of a backward; `first` are the positions of the results that come first.

    What an op of several results computes for both halves is computed in the first; a convolution's backward
    is computed in both, each for its own results.
    """
    gm = _with_convolutions_apart(gm)
    results = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    early = [results[i] for i in first]
    late = [r for i, r in enumerate(results) if i not in set(first)]
    ahead = ancestors(early)
    needed = ancestors(late)
    for node in gm.graph.nodes:  # tensors are handed on, not the tuples that hold them
        if node in needed and node.target is operator.getitem and node.args[0] in ahead:
            ahead.add(node)
    handed = [
        n
        for n in gm.graph.nodes
        if n in needed
        and (n in ahead or n.op == "placeholder")
        and (n in late or any(u in needed and u not in ahead and u.op != "output" for u in n.users))
    ]
    # sizes of which others are made: code says `3*s0` by `s0`
    sizes = [n for n in gm.graph.find_nodes(op="placeholder") if n not in handed]
    handed += sizes_behind([*handed, *(needed - ahead)], sizes)
    return _inputs(gm, early, handed, ahead), _weights(gm, late, handed, needed - ahead)


def _with_convolutions_apart(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy in which the gradients of a convolution's input and of its weights are calls of their own."""
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, {})
    graph.output(output)
    copied = graph_module(gm, graph)
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        mask = node.args[-1]
        assert isinstance(mask, (list, tuple))
        if not mask[0] or not any(mask[1:]):
            continue
        with graph.inserting_after(node):
            weights = graph.node_copy(node, lambda n: n)
        _only(node, [True, False, False])
        _only(weights, [False, *mask[1:]])
        for item in list(node.users):
            if item.args[1] != 0:
                item.replace_input_with(node, weights)
    return copied


def _only(convolution: fx.Node, mask: list[Any]) -> None:
    """Let a convolution's backward compute the results of `mask` alone."""
    convolution.args = (*convolution.args[:-1], mask)
    if "val" in convolution.meta:
        values = zip(convolution.meta["val"], mask, strict=True)
        convolution.meta["val"] = tuple(value if wanted else None for value, wanted in values)


def _inputs(
    gm: fx.GraphModule, early: Sequence[fx.Node | None], handed: Sequence[fx.Node], nodes: set[fx.Node]
) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        if node.op == "placeholder" or (node in nodes and node.op != "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(None if n is None else copies[n] for n in (*early, *handed)))
    return graph_module(gm, graph, "InputGradient")


def _weights(
    gm: fx.GraphModule, late: Sequence[fx.Node | None], handed: Sequence[fx.Node], nodes: set[fx.Node]
) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in handed:
        copies[node] = made = graph.placeholder(node.name)
        made.meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node in nodes and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(None if n is None else copies[n] for n in late))
    return graph_module(gm, graph, "WeightGradient")
