"""What the gathers of a program give, as keys of the whole values that all programs of a model share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxdp.ir.notes import tensor_type
from fxdp.ir.row_buckets import gather_starts, parameter_of, whole_values
from fxdp.pipeline.cut.partition import Part, Partition
from fxdp.runtime.whole_values import Gathered, Key


def gathered_keys(partition: Partition, placement: Sequence[int], rank: int) -> Gathered:
    """What all pipeline ranks gather, and of that one rank's; `placement` is the rank of each stage."""
    places, own = set(), dict[str, Key]()
    for part, home in zip(partition.gathers, placement, strict=True):
        keys = {} if part is None else _keys(part)
        places |= {(home, *key) for key in keys.values()}
        own |= keys if home == rank else {}
    return Gathered(frozenset(places), own)


def _keys(part: Part) -> dict[str, Key]:
    """The parameter and dtype of each value that a part gives, by its name in the program, in order."""
    graph = part.gm.graph
    pairs = [pair for start in gather_starts(graph, backward=False) for pair in whole_values(start)]
    read = {whole: (parameter_of(rows).name, tensor_type(whole).dtype) for rows, whole in pairs}
    values: tuple[fx.Node, ...] = graph.output_node().args[0]  # type: ignore[assignment]
    return {name: read[value] for name, value in zip(part.gives, values, strict=True)}
