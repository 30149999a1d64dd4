"""The regions of nodes and names, and the numbers of those in lists."""

from __future__ import annotations

import operator

from torch import fx

from fxdp.ir.graph.metadata import Location, meta
from fxdp.ir.graph.regions import (
    is_within,
    number_in,
    numbers_in,
    region_of,
    regions_around,
    regions_of,
    renumbered,
    similar_regions,
)


def _chain(paths: list[str]) -> list[fx.Node]:
    graph = fx.Graph()
    value, nodes = graph.placeholder("x"), []
    for path in paths:
        value = graph.call_function(operator.neg, (value,))
        meta(value).location = Location(module=path)
        nodes.append(value)
    return nodes


def test_regions_of_nodes_with_their_parents_in_order() -> None:
    nodes = _chain(["", "h.1.mlp", "h.0", "h.1.mlp", "head"])
    assert [region_of(node) for node in nodes] == ["", "h.1.mlp", "h.0", "h.1.mlp", "head"]
    assert regions_of(nodes) == ["h", "h.1", "h.1.mlp", "h.0", "head"]
    assert regions_around("") == ()


def test_a_name_is_within_a_region_by_its_parts() -> None:
    assert is_within("h.1.mlp.weight", "h.1")
    assert is_within("h.1", "h.1")
    assert not is_within("h.10.mlp", "h.1")
    assert not is_within("h", "h.1")


def test_numbers_of_regions_in_lists() -> None:
    assert numbers_in("h.3.mlp.0") == (("h", 3), ("h.3.mlp", 0))
    assert numbers_in("2") == (("", 2),)
    assert numbers_in("head") == ()
    assert number_in("h.3.mlp.0", "h.3.mlp") == 0
    assert number_in("h.3.mlp.0", "h.2") is None
    assert renumbered("h.3.mlp.0", "h", 7) == "h.7.mlp.0"
    assert renumbered("h.3.mlp.0", "h.3.mlp", "*") == "h.3.mlp.*"
    assert renumbered("3", "", 5) == "5"


def test_an_unknown_region_has_similar_names() -> None:
    assert similar_regions("layer.*", ["embed", "layers.0", "layers.1", "head"]) == ["layers.0", "layers.1"]
    assert similar_regions("zzz", ["embed", "head"]) == []
