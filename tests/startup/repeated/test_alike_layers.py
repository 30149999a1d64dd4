"""Which layers nodes belong to, by the modules that they come from."""

from __future__ import annotations

import operator

import pytest
from torch import fx

from fxdp.ir.graph.metadata import Location, meta
from fxdp.startup.repeated.alike_layers import LayeredProgram, OtherLayersError, layers_of


def _chain(modules: list[str]) -> tuple[fx.Graph, list[fx.Node]]:
    """Each op negates what the one before gives, in the module of its place."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for path in modules:
        value = graph.call_function(operator.neg, (value,))
        meta(value).location = Location(module=path)
    graph.output(value)
    return graph, [n for n in graph.nodes if n.op == "call_function"]


def test_an_op_without_a_module_is_of_the_layer_before_if_one_reads_it() -> None:
    _, nodes = _chain(["", "h.0", "", "h.1.mlp", "", "head", ""])
    assert [layers_of(nodes, "h").get(n) for n in nodes] == [None, 0, 0, 1, None, None, None]


def test_layers_that_read_the_one_before_are_alike() -> None:
    _, nodes = _chain(["embed", *(f"h.{i}" for i in range(5)), "head"])
    found = LayeredProgram([nodes], lambda _: None, {}).layers(4)
    assert list(found.rows) == [0, 1, 2, 3, 4]
    assert found.alike == [1, 2, 3, 4]  # the first reads what is before all layers


def test_a_layer_of_other_ops_ends_the_run() -> None:
    _, nodes = _chain([path for i in range(8) for path in [f"h.{i}"] * (2 if i == 6 else 1)])
    program = LayeredProgram([nodes], lambda _: None, {})
    assert program.layers(4).alike == [1, 2, 3, 4, 5]
    with pytest.raises(OtherLayersError, match="no 6 layers are alike"):
        program.layers(6)
