"""Let each block slice its part from the sum over all blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import copy_meta, meta
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import P, R


@dataclass(frozen=True)
class SliceSums:
    """Replace each reduce-scatter by an all-reduce and a slice, because blocks do not end where ranks do.

    before: `%reduce_scatter = reduce_scatter(%mm, 0, 1, 1)`, `%wait: {dp=S(0)} = wait(%reduce_scatter)`
    after:  `%all_reduce = all_reduce(%mm, sum)`, `%wait: {dp=R} = wait(%all_reduce)`,
            `%shard: {dp=S(0)} = shard(%wait, 0, 1)`
    """

    name = "slice-sums"
    requires = Level.EXPLICIT
    ensures = Level.EXPLICIT

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        for node in gm.graph.find_nodes(op="call_function", target=redistributions.reduce_scatter):
            (wait,) = node.users
            value, dim, outer, _ = node.args
            with gm.graph.inserting_after(wait):
                part = gm.graph.call_function(redistributions.shard, (wait, dim, outer))
            copy_meta(wait, part, operands=(R,))
            wait.replace_all_uses_with(part, lambda user, part=part: user is not part)
            node.target, node.args = redistributions.all_reduce, (value, P.op)
            node._rename("all_reduce")
            meta(node).placement = meta(wait).placement = R
            meta(wait).operands = (R,)
        return gm
