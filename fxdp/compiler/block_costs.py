"""Predict what a step in blocks costs beside the step without blocks, and propose a block.

A block of few samples reads all weights, writes all their gradients and starts all ops for little work:

    seconds of an op      start of the op + the larger of operations and of bytes, over the device's rates
    seconds of a block    its ops, the start of each of its parts, and the sum of its gradients with those
                          of another block

A block has one part, or one for each time that it waits for the others. The rates are those of one CPU core,
or of one GPU; their ratios decide, and caches do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import value_bytes
from fxdp.ir.graph.signature import Gradient
from fxdp.pipeline.cut.cost import node_bytes, node_flops

_MOST = 1.15
"""The largest share of the time without blocks that a proposed block takes."""
_ADDED = 3
"""Passes over memory of an addition: two operands and a result."""


@dataclass(frozen=True)
class _Rates:
    """Operations and bytes in a second, and the seconds to start an op, and to start a part of a block."""

    flops: float
    bytes: float
    start: float
    part: float


_RATES = {"cpu": _Rates(100e9, 24e9, 3e-6, 160e-6), "cuda": _Rates(40e12, 2e12, 6e-6, 160e-6)}


def block_times(
    graph: fx.Graph, device_type: str, samples: int, blocks: Sequence[int], parts: int = 1
) -> list[float]:
    """Return the time of a rank's step in blocks of each size, over its time without blocks.

    `graph` is the joint graph of the global batch, `samples` are those of the rank, `parts` those in which
    a block runs.
    """
    rates = _RATES.get(device_type, _RATES["cpu"])
    full = _seconds(graph, rates, samples)
    sums = sum(value_bytes(node, 1) for spec, node in results_of(graph) if isinstance(spec, Gradient))
    added = _ADDED * sums / rates.bytes
    found = []
    for block in blocks:
        rounds, rest = divmod(samples, block)
        count = rounds + bool(rest)
        seconds = rounds * _seconds(graph, rates, block) + (_seconds(graph, rates, rest) if rest else 0.0)
        found.append((seconds + count * parts * rates.part + (count - 1) * added) / full)
    return found


def block_lines(
    graph: fx.Graph, device_type: str, samples: int, chosen: int, parts: int = 1
) -> tuple[str, ...]:
    """Return the predicted times of blocks of 1, 2, 4, ... and `chosen` samples, and a proposal, as text."""
    if samples < 1:
        return ()
    powers = (1 << power for power in range(samples.bit_length()))
    blocks = sorted({*powers, min(chosen, samples), samples})
    times = block_times(graph, device_type, samples, blocks, parts)
    told = ", ".join(f"{block}: {time:.2f}" for block, time in zip(blocks, times, strict=True))
    cheap = [block for block, time in zip(blocks, times, strict=True) if time <= _MOST]
    proposed, why = samples, "cheapest"
    if cheap:
        proposed, why = cheap[0], f"smallest block that takes at most {_MOST}"
    return (
        f"predicted time of {samples} samples by those in a block, over that without blocks: {told}",
        f"proposed: fxdp.Bitwise(block={proposed}), the {why}",
    )


def _seconds(graph: fx.Graph, rates: _Rates, samples: int) -> float:
    total = 0.0
    for node in graph.nodes:
        flops, moved = node_flops(node, samples), node_bytes(node, samples)
        if flops or moved:
            total += rates.start + max(flops / rates.flops, moved / rates.bytes)
    return total
