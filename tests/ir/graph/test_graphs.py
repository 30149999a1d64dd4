"""Copies, reach and arguments of graphs; collection is paused inside, and after it as it was before."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import fx

from fxdp.ir.graph.graphs import (
    ancestors,
    argument,
    copy_graph,
    erase_unused,
    given_arguments,
    keep_ancestors,
    no_collection,
    reachable,
)
from fxdp.ir.graph.metadata import meta

aten = torch.ops.aten


def diamond() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """`x -> a -> (b, c) -> d`, and `e` beside it, which nobody reads."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.relu.default, (x,))
    b = graph.call_function(aten.neg.default, (a,))
    c = graph.call_function(aten.sin.default, (a,))
    d = graph.call_function(aten.add.Tensor, (b, c))
    e = graph.call_function(aten.cos.default, (b,))
    graph.output((d,))
    return fx.GraphModule({}, graph), {"x": x, "a": a, "b": b, "c": c, "d": d, "e": e}


def test_what_a_node_needs_and_what_it_serves() -> None:
    gm, n = diamond()
    assert ancestors([n["b"], None]) == {n["b"], n["a"], n["x"]}
    assert ancestors([]) == set()
    assert reachable([n["b"]]) == {n["b"], n["d"], n["e"], gm.graph.output_node()}


def test_a_copy_has_notes_of_its_own() -> None:
    gm, n = diamond()
    meta(n["a"]).backward = True
    copied = copy_graph(gm)
    (a,) = copied.graph.find_nodes(op="call_function", target=aten.relu.default)
    assert meta(a).backward
    meta(a).backward = False
    assert meta(n["a"]).backward


def test_unused_calls_are_erased_with_what_they_alone_read() -> None:
    gm, n = diamond()
    with gm.graph.inserting_after(n["e"]):
        gm.graph.call_function(aten.neg.default, (n["e"],))
    erase_unused(gm.graph)
    assert list(gm.graph.nodes) == [*(n[name] for name in "xabcd"), gm.graph.output_node()]


def test_ops_with_effects_stay_unless_only_ancestors_do() -> None:
    gm, n = diamond()
    with gm.graph.inserting_after(n["c"]):
        written = gm.graph.call_function(aten.copy_.default, (n["c"], n["b"]))
    erase_unused(gm.graph)
    assert written in list(gm.graph.nodes)
    keep_ancestors(gm.graph, [written])
    assert written in list(gm.graph.nodes)
    keep_ancestors(gm.graph)
    assert written not in list(gm.graph.nodes)


def test_arguments_are_known_by_name() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.sum.dim_IntList, (x, [0]), {"dtype": torch.float64})
    assert given_arguments(node) == {"self": x, "dim": [0], "dtype": torch.float64}
    assert argument(node, "dim") == [0]
    assert argument(node, "keepdim") is False
    assert argument(node, "dtype") is torch.float64
    assert argument(node, "other") is None


@pytest.mark.parametrize("before", [True, False])
def test_collection_is_paused_and_resumed(before: bool) -> None:
    enabled = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with no_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == before
    finally:
        (gc.enable if enabled else gc.disable)()
