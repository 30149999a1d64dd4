"""Find ops that would run on all samples of a rank at once, so that their bits depend on the mesh.

in a block       any op: a block has the same samples and shapes on every mesh
after the last   collectives of sums over blocks, and ops on full values, which are the same on every rank
before the first the same, of sums over the blocks of inputs (`counted_terms`)
anywhere         views, copies, and ops on integers, whose bits depend on neither place nor order
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from fxdp.errors import StageError
from fxdp.ir import redistributions
from fxdp.ir.graph.graph_text import target_text
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import meta
from fxdp.ir.op_kinds import is_view
from fxdp.ir.types.placements import Partial, Shard
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import aten

_NEUTRAL = redistributions.REDISTRIBUTIONS - {redistributions.partial} | {
    aten.clone.default, aten.cat.default, aten.slice.Tensor,
}  # fmt: skip
"""Calls that copy values or order sums by themselves; a term that only rank 0 has would be no block's."""


def counted_terms(prologue: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the Partial values that the prologue reduces: sums over samples of the inputs alone."""
    above = _above(prologue, set())
    values = [n.all_input_nodes[0] for n in above if n.target in redistributions.COLLECTIVES]
    return [value for value in values if isinstance(meta(value).placement, Partial)]


def check_blocks(
    graph: fx.Graph, prologue: Iterable[fx.Node], epilogue: set[fx.Node], free: set[fx.Node], block: int
) -> None:
    """Refuse ops outside of blocks whose bits depend on the rank's samples.

    Raises
    ------
    StageError : names the ops with their lines.
    """
    terms = set(counted_terms(prologue))
    early = _above(prologue, terms)
    results = {node for _, node in results_of(graph)}
    alone = [n for n in free if n in results or any(user in epilogue for user in n.users)]
    outside = [n for n in (*early, *epilogue, *_above(alone, set(early) | terms)) if _depends(n)]
    chained = [t for t in terms if any(n.target in redistributions.COLLECTIVES for n in _above([t], set()))]
    faults = [n for n in graph.nodes if n in {*outside, *chained}]
    if faults:
        lines = dict.fromkeys(f"at {meta(n).location}: {target_text(n.target)}" for n in faults)
        listing = "\n  ".join(lines)
        raise StageError(
            f"fxdp.Bitwise(block={block}): these ops read samples of several blocks at once, so their bits "
            f"would depend on the mesh:\n  {listing}\nUse numerics='exact' for this model, or compute these "
            "values outside of the compiled model"
        )


def _above(nodes: Iterable[fx.Node], border: set[fx.Node]) -> list[fx.Node]:
    """Return these nodes and all above them, up to the nodes of `border`, which are left out."""
    pending, found = list(nodes), dict[fx.Node, None]()
    while pending:
        node = pending.pop()
        if node not in found and node not in border:
            found[node] = None
            pending.extend(node.all_input_nodes)
    return list(found)


def _depends(node: fx.Node) -> bool:
    """Return whether the bits of an op's result may depend on how many samples the rank has."""
    if node.op != "call_function" or node.target in _NEUTRAL or is_view(node.target):
        return False
    return any(isinstance(where, Shard | Partial) for where in _float_placements(node))


def _float_placements(node: fx.Node) -> Iterator[object]:
    for type_, placement in zip(meta(node).types, meta(node).placements, strict=False):
        if isinstance(type_, TensorType) and (type_.dtype.is_floating_point or type_.dtype.is_complex):
            yield placement
