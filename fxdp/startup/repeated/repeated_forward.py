"""Repeated layers of a forward graph, and a shorter graph with only a few of the layers.

    embed  h.0 h.1 h.2 ... h.22 h.23  head      shortened:   embed  h.0 h.1 h.2 h.3 h.4 h.23  head

Layers are found without knowledge of modules, as runs of the same ops on values of the same shapes. Each
layer reads the previous layer's results and separate parameters. Values that all layers read (a mask, a
shared weight) are computed before the first layer; nodes after the layers read only the last layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from fxdp.capture.export.exported import Exported
from fxdp.capture.joint.annotate_joint import first_names
from fxdp.capture.locations import module_path
from fxdp.ir.graph.graph_form import NoTextError, tensor_text, value_text
from fxdp.ir.graph.graphs import attribute_of
from fxdp.startup.repeated.region_windows import Place, Regions, find_regions, operands
from fxdp.torch_compat import graph_module

KEPT = (4, 5, 6)
"""Numbers of layers of a shortened graph, tried in this order.

The first and last layer have neighbors of a different kind; two equal layers are needed between them. If
layers in between differ from one another, the next number is tried.
"""
_LEAST = 9
"""Least number of layers: tracing fewer takes less time than finding and expanding repeated layers."""
_SHORTEST = 6
"""Least number of nodes of a layer in a forward graph."""
_TRIMMED = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1))
"""Numbers of first and last layers to leave out, tried in order: a first layer may compute shared values."""

Names = tuple[str, ...]


@dataclass(frozen=True)
class Layers:
    """Repeated layers of a forward graph."""

    region_windows: Regions
    parameter_groups: tuple[Names, ...]
    """First names of parameters and buffers: for each position in a layer, the names in all layers."""
    reduced: int = KEPT[0]
    """Number of layers in a shortened graph."""

    @property
    def count(self) -> int:
        """Return the number of layers."""
        return len(self.region_windows.rows)

    @property
    def kept(self) -> tuple[int, ...]:
        """Return the indices of the layers that a shortened graph keeps."""
        return (*range(self.reduced - 1), self.count - 1)


class _OthersError(Exception):
    """Layers differ, or nodes outside of the next layer read a layer."""


def find_layers(exported: Exported) -> Layers | None:
    """Return the repeated layers of an exported graph; None if there are few, or if some differ."""
    if not exported.symbolic or exported.routes:
        return None
    calls = [node for node in exported.gm.graph.nodes if node.op == "call_function"]
    found = find_regions(
        calls, lambda node: value_text(node.meta.get("val")), shortest=_SHORTEST, least=_LEAST
    )
    if found is None:
        return None
    for first, last in _TRIMMED:
        trimmed = found.without(first, last)
        if len(trimmed.rows) < _LEAST:
            break
        try:
            return _checked(exported, trimmed)
        except _OthersError:
            continue
    return None


def _checked(exported: Exported, region_windows: Regions) -> Layers:
    """Return the layers, if each reads the previous layer in the same way."""
    places, last = region_windows.places, len(region_windows.rows) - 1
    for node in exported.gm.graph.nodes:
        if node not in places and any(places.get(n, (last, 0))[0] != last for n in operands(node)):
            raise _OthersError
    parameter_groups = _ParameterGroups(exported, places)
    for row in zip(*region_windows.rows.values(), strict=True):
        for column in zip(*map(operands, row), strict=True):
            if any(node.op == "get_attr" for node in column):
                parameter_groups.add(column)
            else:
                _check_alike([_reads(node, i, places) for i, node in enumerate(column)])
    if (
        not parameter_groups.names
    ):  # shared weights in all layers: in a joint graph the layers could not be identified
        raise _OthersError
    parameter_groups.check_readers()
    return Layers(region_windows, tuple(parameter_groups.names))


def _check_alike(column: list[object]) -> None:
    """Raise unless layers from the second on read equally, and the first reads from before the layers."""
    chained = isinstance(column[1], tuple) and column[1][0] == 1
    if len(set(column[1:])) > 1 or (isinstance(column[0], tuple) if chained else column[0] != column[1]):
        raise _OthersError


def _reads(node: fx.Node, window: int, places: Mapping[fx.Node, Place]) -> object:
    """Return a description of the read node that is equal for the corresponding read in the next layer."""
    if node not in places:
        return node
    i, k = places[node]
    if window - i not in (0, 1):
        raise _OthersError
    return window - i, k


class _ParameterGroups:
    """Parameters and buffers at corresponding positions of the layers."""

    def __init__(self, exported: Exported, places: Mapping[fx.Node, Place]) -> None:
        self.names: list[Names] = []
        self._gm = exported.gm
        self._first = first_names(exported.owner)
        self._places = places
        self._of: dict[str, tuple[Names, int]] = {}

    def add(self, column: Sequence[fx.Node]) -> None:
        """Add the operands at one position of all layers; one tensor shared by all layers forms no group."""
        if len(set(column)) == 1:
            return
        names = tuple(map(self._name, column))
        if len(set(names)) < len(names) or len({_kind(attribute_of(self._gm, n)) for n in column}) > 1:
            raise _OthersError
        for i, name in enumerate(names):
            if self._of.setdefault(name, (names, i)) != (names, i):
                raise _OthersError
        if names not in self.names:
            self.names.append(names)

    def check_readers(self) -> None:
        """Raise if a tensor of one layer is read outside of this layer."""
        for node in self._gm.graph.find_nodes(op="get_attr"):
            _, layer = self._of.get(self._first.get(module_path(str(node.target)), ""), (None, None))
            if layer is not None and any(self._places.get(n, (-1, 0))[0] != layer for n in node.users):
                raise _OthersError

    def _name(self, node: fx.Node) -> str:
        name = self._first.get(module_path(str(node.target))) if node.op == "get_attr" else None
        if name is None:  # a constant, or the graph of a region
            raise _OthersError
        return name


def _kind(tensor: torch.Tensor) -> str:
    try:
        return f"{isinstance(tensor, nn.Parameter)} {tensor_text(tensor)}"
    except NoTextError as error:
        raise _OthersError from error


def shortened(exported: Exported, layers: Layers) -> Exported:
    """Return the forward with only a few of the layers."""
    rows, places = layers.region_windows.rows, layers.region_windows.places
    dropped = {node for i, row in rows.items() if i not in layers.kept for node in row}
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.set_codegen(exported.gm.graph._codegen)

    def copy_of(node: fx.Node) -> fx.Node:
        # the last layer reads its new predecessor
        return copies[rows[layers.reduced - 2][places[node][1]] if node in dropped else node]

    for node in exported.gm.graph.nodes:
        if node in dropped or (node.op == "get_attr" and node.users and dropped.issuperset(node.users)):
            continue
        copies[node] = graph.node_copy(node, copy_of)
    return replace(exported, gm=graph_module(exported.gm, graph))
