"""Loops over the samples that stayed loops.

Law: a turn reads its own sample's rows and shared values, so each rank runs the turns of its samples; what
shared values get as gradients is the sum over the turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

from fxdp.ir.ops.sequential_sample_loop import LOOP_BACKWARD_OP, LOOP_OP
from fxdp.rules.labels import by_labels
from fxdp.rules.registry import Alternative, Op, rule


@rule("iterations", LOOP_OP)
def iterations(op: Op) -> Iterator[Alternative]:
    """A row of the result for each sample."""
    yield from by_labels(op, [(rows, "n...") for rows in op.arg("rows")], "n...")


@rule("iterations", LOOP_BACKWARD_OP, kind="contracted")
def iterations_backward(op: Op) -> Iterator[Alternative]:
    """Gradients of the samples' rows, and of what they share a term of the sum."""
    rows, shared = op.arg("rows"), op.arg("shared")
    results = compress(["n..."] * len(rows) + ["..."] * len(shared), op.arg("wanted"))
    yield from by_labels(op, [(value, "n...") for value in (op.arg("grad"), *rows)], list(results))
