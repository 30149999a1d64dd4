"""Cut the gathers of parameters off a program, so that they run when rows have changed and not at each call.

    gather    %gather_rows = gather_rows([%w, %b], (20, 5), ())     reads rows, gives %w_whole, %b_whole
    program   %mm = aten.mm(%x, %w_whole)                           takes these as it takes its inputs
"""

from __future__ import annotations

from torch import fx

from fxdp.ir.graphs import results_of
from fxdp.ir.row_buckets import gather_starts, whole_values
from fxdp.ir.slots import Crossing
from fxdp.pipeline.cut.part_builder import PartBuilder
from fxdp.pipeline.cut.partition import Part, Partition


def split_gathers(gm: fx.GraphModule) -> Partition:
    """The program without its gathers as the one part, and these, if there are any, as another."""
    starts = gather_starts(gm.graph, backward=False)
    wholes = [whole for start in starts for _, whole in whole_values(start)]
    if not wholes:
        return _partition(Part(gm, (), ()))
    gather, program = PartBuilder(gm), PartBuilder(gm)
    gather.include(wholes, lambda _: None)
    names = {whole: Crossing(whole.name) for whole in wholes}
    output = gm.graph.output_node()
    # gradients belong to parameters, so these stay inputs, though nothing else reads their rows
    own = [n for n in gm.graph.nodes if n is not output and n not in gather.included]
    program.include([*gm.graph.find_nodes(op="placeholder"), *own], names.get)
    results = results_of(gm.graph)
    program.include([node for _, node in results], names.get)
    reads = tuple(names[node] for node in program.reads())
    part = Part(program.build(results, "Program"), reads, ())
    built = gather.build([(names[n], n) for n in wholes], "Gather")
    return _partition(part, Part(built, (), tuple(n.name for n in wholes)))


def _partition(part: Part, *gathers: Part) -> Partition:
    return Partition(1, None, (part,), (None,), (), {}, (), gathers)
