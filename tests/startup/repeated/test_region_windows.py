"""Windows of a row of nodes, and what there is of the window before the first."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxdp.startup.repeated.region_windows import begun_before, find_regions

_OPS = (torch.relu, torch.tanh, torch.sigmoid)


def _known(node: fx.Node) -> str:
    return type(node.meta["val"]).__name__


def _call(graph: fx.Graph, target: object, *read: fx.Node) -> fx.Node:
    made = graph.call_function(target, read)  # type: ignore[arg-type]
    made.meta["val"] = 2 if target is operator.index else torch.ones(2)
    return made


def _layers(*, size: bool, shared: bool = False) -> list[fx.Node]:
    """`exp | relu (size) tanh sigmoid | ...` four times; what the first relu gives may be read by all."""
    graph = fx.Graph()
    x = _call(graph, torch.exp, graph.placeholder("x"))
    first = None
    for layer in range(4):
        for op in _OPS:
            x = _call(graph, op, x)
            first = first or x
            if layer == 0 and op is torch.relu and size:
                _call(graph, operator.index, x)
        if shared and layer > 1:
            x.insert_arg(1, first)
        elif shared:
            x.insert_arg(1, x.args[0])
    return [node for node in graph.nodes if node.op == "call_function"]


def _begun(nodes: list[fx.Node]) -> dict[str, tuple[int, int]]:
    region_windows = find_regions(nodes, _known, shortest=3, least=3)
    assert region_windows is not None
    return {node.name: place for node, place in begun_before(nodes, region_windows, _known).items()}


def test_a_row_that_is_alike_from_the_first_layer_on_has_begun_nothing() -> None:
    assert _begun(_layers(size=False)) == {}


def test_a_size_parts_the_first_layer_which_still_has_its_places() -> None:
    """Windows are tanh, sigmoid, relu; the relu before them is the last node of window -1."""
    assert _begun(_layers(size=True)) == {"relu": (-1, 2)}


def test_what_others_than_the_first_window_read_is_of_no_layer() -> None:
    assert _begun(_layers(size=True, shared=True)) == {}


def test_another_op_ends_what_has_begun() -> None:
    nodes = _layers(size=True)
    nodes[1].target = torch.exp
    assert _begun(nodes) == {}
