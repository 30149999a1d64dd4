"""Cut the gathers of parameters off a program, so that they run when rows have changed and not at each call.

    gather    %gather_rows = gather_rows([%w, %b], (20, 5), ())     reads rows, gives %w_whole, %b_whole
    program   %mm = aten.mm(%x, %w_whole)                           takes these as it takes its inputs
"""

from __future__ import annotations

from torch import fx

from fxdp.errors import VerifierError
from fxdp.ir.graphs import results_of
from fxdp.ir.notes import note
from fxdp.ir.row_buckets import gather_starts, parameter_of, whole_values
from fxdp.ir.slots import Crossing, Parameter
from fxdp.pipeline.cut.part_builder import PartBuilder
from fxdp.pipeline.cut.partition import Part, Partition


def split_gathers(gm: fx.GraphModule) -> Partition:
    """The program without its gathers as the one part, and these, if there are any, as another.

    Raises
    ------
    VerifierError : a gather that cannot be left out of a call; a bug in a pass.
    """
    late = gather_starts(gm.graph, backward=True)
    if late:
        raise VerifierError(
            f"%{late[0].name} gathers for the backward, in a program whose whole values stay until rows "
            "change; this is a bug in a pass"
        )
    starts = gather_starts(gm.graph, backward=False)
    pairs = [pair for start in starts for pair in whole_values(start)]
    if not pairs:
        return _partition(Part(gm, (), ()), None)
    gather = _gather(gm, pairs)
    names = {whole: Crossing(whole.name) for _, whole in pairs}
    program = PartBuilder(gm)
    output = gm.graph.output_node()
    # gradients belong to parameters, so these stay inputs, though nothing else reads their rows
    own = [n for n in gm.graph.nodes if n is not output and n not in gather.included]
    program.include([*gm.graph.find_nodes(op="placeholder"), *own], names.get)
    results = results_of(gm.graph)
    program.include([node for _, node in results], names.get)
    reads = tuple(names[node] for node in program.reads())
    part = Part(program.build(results, "Program"), reads, ())
    wholes = [whole for _, whole in pairs]
    built = gather.build([(names[n], n) for n in wholes], "Gather")
    return _partition(part, Part(built, (), tuple(n.name for n in wholes)))


def _partition(part: Part, gather: Part | None) -> Partition:
    return Partition(1, None, (part,), (None,), (), {}, (), () if gather is None else (gather,))


def _gather(gm: fx.GraphModule, pairs: list[tuple[fx.Node, fx.Node]]) -> PartBuilder:
    builder = PartBuilder(gm)
    for rows, whole in pairs:
        builder.include([whole], lambda _: None)
        other = [n for n in builder.included if n.op == "placeholder" and not _is_parameter(n)]
        if other:
            raise VerifierError(
                f"the gather of {parameter_of(rows).name} reads %{other[0].name}, which each call brings, "
                "but runs only when rows have changed; this is a bug in a pass"
            )
    return builder


def _is_parameter(node: fx.Node) -> bool:
    return isinstance(note(node).slot, Parameter)
