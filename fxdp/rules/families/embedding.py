"""Tables read by row number.

Law: every index reads its own row of an entire table, so the index dims split freely and lead the result.
The table's gradient sums the rows' gradients over all indices, and is partial where these are split,
unless each row is divided by its *global* frequency.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.library import aten, existing
from fxdp.ir.placements import P, R
from fxdp.ir.sizes import hint, product
from fxdp.ir.types import TensorType
from fxdp.rules.labels import by_labels, letters, linear
from fxdp.rules.registry import Alternative, Op, rule

_MAXIMUM = 2
"""The `mode` of bags whose rows are compared, not summed."""


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


@rule("embedding", aten.embedding_dense_backward.default, kind="contracted")
def embedding_backward(op: Op) -> Iterator[Alternative]:
    """Sum of the rows' gradients: partial over split indices, or over a partial gradient."""
    grad, indices = op.operands
    counted = op.arg("scale_grad_by_freq")
    rows = "_" * indices.ndim if counted else letters(indices.ndim)
    yield from by_labels(op, [(grad, rows + "Z"), (indices, rows)], ["_Z"])
    if no_larger(op.output, grad.type):
        yield from linear(op, [grad])


@rule("embedding", *existing("_embedding_bag", "_embedding_bag_forward_only"), kind="gathered")
def embedding_bag(op: Op) -> Iterator[Alternative]:
    """Bags that begin at `offsets`: where a rank's bags lie among the indices is known to their values only.

    Sums and means are linear in the table. Bags of equal length are taken apart by capture, into reads
    of rows that split (`capture.substitutes`).
    """
    if op.arg("mode") != _MAXIMUM and P in op.arg("weight").placements:
        yield op.alternative({0: P}, (P, *(R if t else None for t in op.outputs[1:])))


@rule("embedding", *existing("_embedding_bag_backward"), kind="gathered")
@rule("embedding", *existing("_embedding_bag_dense_backward"), kind="contracted")
def embedding_bag_backward(op: Op) -> Iterator[Alternative]:
    """The table's gradient sums over indices, each reading its bag's row of a full gradient."""
    grad = op.arg("grad")
    if op.arg("mode") == _MAXIMUM or op.arg("scale_grad_by_freq"):
        return
    if op.target in existing("_embedding_bag_dense_backward"):
        split = [op.arg("indices"), op.arg("offset2bag"), op.arg("per_sample_weights")]
        yield from by_labels(op, [(o, "i") for o in split if o is not None], ["__"])
    if no_larger(op.output, grad.type):
        yield from linear(op, [grad])


@rule("embedding", *existing("_embedding_bag_per_sample_weights_backward"))
def embedding_bag_weights_backward(op: Op) -> Iterator[Alternative]:
    """Each index's weight gets its row times its bag's gradient; linear in either."""
    by_index = [(op.arg("indices"), "i"), (op.arg("offset2bag"), "i")]
    if op.arg("offset2bag").shape == op.arg("indices").shape:
        yield from by_labels(op, by_index, ["i"])
    yield from linear(op, [op.arg("grad")], [op.arg("weight")])
