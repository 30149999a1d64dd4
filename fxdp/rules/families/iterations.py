"""Rules for loops over samples that run sequentially.

Law: an iteration reads the rows of one sample and shared values, so each rank runs the iterations of its
samples. The gradients of shared values are sums over the iterations.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

from fxdp.ir.ops.sequential_sample_loop import LOOP_BACKWARD_OP, LOOP_OP
from fxdp.rules.labels import by_labels
from fxdp.rules.registry import Alternative, Op, rule


@rule("iterations", LOOP_OP)
def iterations(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples, with one row of the result for each sample."""
    yield from by_labels(op, [(rows, "n...") for rows in op.arg("rows")], "n...")


@rule("iterations", LOOP_BACKWARD_OP, kind="contracted")
def _iterations_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples: the gradients of rows are sharded, of shared values partial."""
    rows, shared = op.arg("rows"), op.arg("shared")
    results = compress(["n..."] * len(rows) + ["..."] * len(shared), op.arg("wanted"))
    yield from by_labels(op, [(value, "n...") for value in (op.arg("grad"), *rows)], list(results))
