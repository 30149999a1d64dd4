"""Values that are converted several times further down, and are better converted once, where they are made.

A sum of terms that two linear ops pass on is reduced before them; a part that two cheap ops read, whose
results are wanted full, is gathered before them (placement notes, 5).
"""

from __future__ import annotations

from torch import fx

from fxdp.ir.metadata import meta, tensor_operands, value_bytes
from fxdp.ir.placements import P, Partial, Placement, R, Shard
from fxdp.ir.sizes import batch_factor
from fxdp.ir.types import TensorType
from fxdp.placing.propagation import ShardingPropagation


def shared_redistributions(propagation: ShardingPropagation) -> dict[fx.Node, Placement]:
    """Where to convert once what is now converted several times further down."""
    reduced: list[tuple[list[fx.Node], Placement]] = []
    gathered: list[tuple[list[fx.Node], Placement]] = []
    for node, wanted in propagation.redistributions:
        own = meta(node).placement
        if isinstance(own, Partial):
            # in the forward once is enough: the sooner a sum is started, the more of them travel together
            twice = 1 if meta(node).backward or wanted != R else 2
            reduced += [(_chain(node), wanted)] * twice
        elif isinstance(own, Shard) and wanted == R:
            gathered.append((_sources(propagation, node), R))
    return {**_meetings(gathered, first=False), **_meetings(reduced, first=True)}


def _meetings(
    chained_modules: list[tuple[list[fx.Node], Placement]], *, first: bool
) -> dict[fx.Node, Placement]:
    """The values that two chains share, each the first (or last) in the graph of its chain.

    Their sum is wanted entire if any redistribution wants it full, else as the shard that most rows are of.
    """
    reached: dict[fx.Node, list[Placement]] = {}
    for chain, wanted in chained_modules:
        for ancestor in chain:
            reached.setdefault(ancestor, []).append(wanted)
    shared = {n for n, found in reached.items() if len(found) > 1}
    chosen: dict[fx.Node, Placement] = {}
    for chain, _ in chained_modules:
        met = [n for n in chain if n in shared]
        if met:
            # a chain runs upwards: sums meet as far up as they can, parts as far down
            node = met[-1 if first else 0]
            chosen[node] = R if R in reached[node] else _first_shard(node)
    return chosen


def _first_shard(node: fx.Node) -> Placement:
    type_ = meta(node).type
    assert isinstance(type_, TensorType)
    return next((Shard(d) for d, n in enumerate(type_.shape) if batch_factor(n) is not None), R)


def _chain(node: fx.Node) -> list[fx.Node]:
    """A partial value and those from which linear ops make it without making it larger."""
    chain = [node]
    while True:
        operands = zip(tensor_operands(chain[-1]), meta(chain[-1]).operands, strict=False)
        partial = [s for s, wanted in operands if wanted == P and meta(s).placement == P]
        # of two terms that are added their sum is one reduction, they are two
        if len(partial) != 1 or value_bytes(partial[0]) > value_bytes(chain[-1]):
            return chain
        chain.append(partial[0])


def _sources(propagation: ShardingPropagation, node: fx.Node) -> list[fx.Node]:
    """A sharded value and those, no larger, from which cheap ops make it."""
    chain = [node]
    while True:
        source = propagation.values[chain[-1]].source
        if source is None or value_bytes(source) > value_bytes(node):
            return chain
        chain.append(source)
