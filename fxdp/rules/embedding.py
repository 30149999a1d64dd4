"""Tables read by row number.

Law: every index reads its own row of a whole table, so the index dims split freely and lead the result.
The table's gradient sums the rows' gradients over all indices, and is partial where these are split,
unless each row is divided by its *global* frequency.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.annotations import TensorType
from fxdp.rules.labels import by_labels, letters, linear
from fxdp.rules.registry import Alternative, Op, aten, rule
from fxdp.symbols import hint, product


def no_larger(a: TensorType, b: TensorType) -> bool:
    """Whether `a` has at most as many elements as `b`: then a sum over ranks moves past the op."""
    return hint(product(*a.shape)) <= hint(product(*b.shape))


@rule("embedding", aten.embedding.default)
def embedding(op: Op) -> Iterator[Alternative]:
    """`weight[indices]`: index dims sharded, or a partial table read in parts."""
    weight, indices = op.operands
    rows = letters(indices.ndim)
    yield from by_labels(op, [(weight, "_Z"), (indices, rows)], [rows + "Z"])
    yield from linear(op, [weight])


@rule("embedding", aten.embedding_dense_backward.default)
def embedding_backward(op: Op) -> Iterator[Alternative]:
    """Sum of the rows' gradients: partial over split indices, or over a partial gradient."""
    grad, indices = op.operands
    counted = op.arg("scale_grad_by_freq")
    rows = "_" * indices.ndim if counted else letters(indices.ndim)
    yield from by_labels(op, [(grad, rows + "Z"), (indices, rows)], ["_Z"])
    if no_larger(op.output, grad.type):
        yield from linear(op, [grad])
