"""Compute the forward of chosen modules again in the backward, instead of saving it."""

from __future__ import annotations

import difflib
import fnmatch
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from fxdp.errors import InputError
from fxdp.ir.draws import node_draws
from fxdp.ir.graphs import spread
from fxdp.ir.level import Level
from fxdp.ir.mesh import Mesh
from fxdp.ir.metadata import copy_meta, is_host_size, meta, tensor_operands
from fxdp.ir.types import tensor_types


def _module_paths(graph: fx.Graph) -> list[str]:
    """The modules that compute something, and those around them, in the order in which they run."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        found |= dict.fromkeys(_around(meta(node).location.module))
    return list(found)


def _around(path: str) -> list[str]:
    """A module's path and those of the modules around it, the outermost first."""
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _check(patterns: Sequence[str], paths: Sequence[str]) -> None:
    lines = []
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            near = difflib.get_close_matches(pattern.replace("*", "0"), paths, n=3, cutoff=0.5)
            near = near or list(dict.fromkeys(path.partition(".")[0] for path in paths))[:8]
            lines.append(f"{pattern!r}; near it: {', '.join(near) or 'no module at all'}")
    if lines:
        listed = "\n  ".join(lines)
        raise InputError(f"recompute= names no module that computes anything in this model:\n  {listed}")


@dataclass
class _Regions:
    """Which of the chosen modules each op of the forward runs in: the outermost one that a pattern names."""

    patterns: Sequence[str]
    known: dict[str, str | None] = field(default_factory=dict)

    def of(self, node: fx.Node) -> str | None:
        path = meta(node).location.module
        if path not in self.known:
            chosen = (p for p in _around(path) if any(fnmatch.fnmatchcase(p, one) for one in self.patterns))
            self.known[path] = next(chosen, None)
        return self.known[path]


def _repeatable(graph: fx.Graph, regions: _Regions) -> set[fx.Node]:
    """The values that are computed again where the backward reads them.

    Not those that leave their module: else the backward would go back to the beginning of the model. Not what
    is drawn, which would be drawn anew. Not what ranks convert: that would be communicated a second time.
    """
    inside: dict[fx.Node, str] = {}
    kept: set[fx.Node] = set()
    for node in graph.nodes:
        region = regions.of(node)
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
    """Let the backward read copies, made right before the first op that reads one."""
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
    """After it the backward computes what it reads of chosen modules again, from what goes into them.

    before: `%h = gelu(%x)` in layers.0.act, and the backward's `%dw = mm(%g, %h)`
    after:  `%h_1 = gelu(%x)` right before `%dw = mm(%g, %h_1)`

    What leaves such a module stays saved, what is drawn in it is not drawn again, and no collective of the
    forward is repeated: what they read or give is saved. A compiler is told what to save
    (`Metadata.recompute`): it would find the copies equal to what the forward has computed.

    Parameters
    ----------
    patterns : names of modules, with `*` and `?`; each stands for all that is in it.
    """

    patterns: tuple[str, ...]

    name = "recompute-modules"
    requires = Level.PLACED
    ensures = Level.PLACED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place.

        Raises
        ------
        InputError : a pattern that fits no module, with those that are near.
        """
        _check(self.patterns, _module_paths(gm.graph))
        _repeat(gm.graph, _repeatable(gm.graph, _Regions(self.patterns)))
        return gm
