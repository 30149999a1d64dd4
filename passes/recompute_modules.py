"""Recompute the forward of chosen modules in the backward, instead of saving values."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from fxdp.errors import InputError
from fxdp.ir.graph.draws import node_draws
from fxdp.ir.graph.graphs import spread
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import copy_meta, is_host_size, meta, tensor_operands
from fxdp.ir.graph.regions import region_of, regions_around, regions_of, similar_regions
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.value_types import tensor_types


def _chosen_regions(graph: fx.Graph, patterns: Sequence[str]) -> set[str]:
    """Return the regions that match a pattern."""
    regions, chosen, lines = regions_of(graph.nodes), set[str](), []
    for pattern in patterns:
        found = [path for path in regions if fnmatch.fnmatchcase(path, pattern)]
        if not found:
            near = similar_regions(pattern, regions) or [path for path in regions if "." not in path][:8]
            lines.append(f"{pattern!r}; near it: {', '.join(near) or 'no module at all'}")
        chosen.update(found)
    if lines:
        listed = "\n  ".join(lines)
        raise InputError(
            f"activation_checkpointing names no module that computes anything in this model:\n  {listed}\n"
            "expected names of modules, as in activation_checkpointing=['layers.*']"
        )
    return chosen


def _repeatable(graph: fx.Graph, chosen: Collection[str]) -> set[fx.Node]:
    """Return the forward values that are recomputed for the backward.

    Excluded are values that leave their module, because otherwise the backward would recompute everything
    since the beginning of the model; random values, which would be drawn anew; and values that are
    redistributed, because the communication would be repeated.
    """
    inside: dict[fx.Node, str] = {}
    kept: set[fx.Node] = set()
    for node in graph.nodes:
        # of nested ones the outermost
        region = next((one for one in regions_around(region_of(node)) if one in chosen), None)
        for source, wanted in zip(tensor_operands(node), meta(node).operands, strict=False):
            if wanted is not None and wanted != meta(source).placement:
                kept.add(source)
        if not meta(node).backward:
            kept |= {s for s in node.all_input_nodes if s in inside and inside[s] != region}
        if node.op == "call_function" and not meta(node).backward and region is not None:
            inside[node] = region
    results = set(graph.output_node().all_input_nodes)
    found: set[fx.Node] = set()
    for node in inside:
        picked = node.target is operator.getitem
        drawn = node_draws(node) or node.is_impure() or is_host_size(node)
        tensors = bool(tensor_types(meta(node).type))
        comes_along = not picked or node.all_input_nodes[0] in found
        if tensors and comes_along and not drawn and node not in kept and node not in results:
            found.add(node)
    return found


def _repeat(graph: fx.Graph, repeatable: set[fx.Node]) -> None:
    """Let the backward read copies of the repeatable nodes, inserted right before their first reader."""
    copies: dict[fx.Node, fx.Node] = {}
    position = {node: i for i, node in enumerate(graph.nodes)}
    for reader in list(graph.nodes):
        if not meta(reader).backward or reader.op != "call_function":
            continue
        needed = spread([reader], lambda node: repeatable.intersection(node.all_input_nodes)) - {reader}
        for node in sorted(needed - copies.keys(), key=position.__getitem__):
            with graph.inserting_before(reader):
                made = graph.node_copy(node, lambda source: copies.get(source, source))
            copies[node] = made
            _tag(node, made)
        for source in reader.all_input_nodes:
            if source in copies:
                reader.replace_input_with(source, copies[source])


def _tag(node: fx.Node, made: fx.Node) -> None:
    copy_meta(node, made, backward=True, recompute="computed")
    meta(node).recompute = "computed"
    for source in made.all_input_nodes:
        if source.op == "call_function" and not meta(source).backward:
            meta(source).recompute = "saved"


@dataclass(frozen=True)
class RecomputeModules:
    """Recompute, in the backward, values of chosen modules from the inputs of these modules.

    before: `%h = gelu(%x)` in layers.0.act, and the backward's `%dw = mm(%g, %h)`
    after:  `%h_1 = gelu(%x)` right before `%dw = mm(%g, %h_1)`

    Outputs of a chosen module stay saved. Random values in a module are not drawn again, and no collective of
    the forward is repeated: their operands and results are saved. `Metadata.recompute` tells a compiler which
    values to save; without this mark, the compiler would find that the copies equal the forward's values and
    merge both.

    Parameters
    ----------
    patterns : module names, with the wildcards `*` and `?`; each stands for the module and all its
        submodules.
    """

    patterns: tuple[str, ...]

    name = "recompute-modules"
    requires = Level.PLACED
    ensures = Level.PLACED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place.

        Raises
        ------
        InputError : a pattern matches no module; the message lists names that are close.
        """
        _repeat(gm.graph, _repeatable(gm.graph, _chosen_regions(gm.graph, self.patterns)))
        return gm
