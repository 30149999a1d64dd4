"""Rules for tables that are read by row number.

Law: every index reads a row of the full table, so the index dims may be sharded; they come first in the
result. The table's gradient sums the rows' gradients over all indices, and is partial where these are
sharded, unless each row is divided by its *global* frequency.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fxdp.ir.ops.library import aten, existing
from fxdp.ir.ops.sparse_rows import SPARSE_ROWS
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import Dim, P, R, S
from fxdp.ir.types.sizes import hint, product
from fxdp.ir.types.value_types import TensorType
from fxdp.rules.labels import by_labels, letters, linear
from fxdp.rules.registry import Alternative, Op, Operand, Pointer, rule

_MAXIMUM = 2
"""The `mode` of bags whose rows are compared, not summed."""


def no_larger(a: TensorType, b: TensorType) -> bool:
    """Return whether `a` has at most as many elements as `b`, so that a reduction is better after the op."""
    return hint(product(*a.shape)) <= hint(product(*b.shape))


def _own_rows(size: Dim, indices: Operand) -> Pointer | None:
    """Return where indices point, if these are rows of the rank's own in a table of this size."""
    into = indices.into
    return None if into is None or size != into.size else into


def _less(indices: Operand, own: Pointer) -> Rewrite:
    return Rewrite(minus_offset=(indices.index,), offset=own.offset)


@rule("embedding", aten.embedding.default)
def _embedding(op: Op) -> Iterator[Alternative]:
    """Yield shards for `weight[indices]`: of the index dims, or a partial table."""
    weight, indices = op.operands
    rows = letters(indices.ndim)
    yield from by_labels(op, [(weight, "_Z"), (indices, rows)], [rows + "Z"])
    if (own := _own_rows(weight.shape[0], indices)) is not None:
        yield op.alternative({weight.index: S(0), indices.index: own.shard}, own.shard, _less(indices, own))
    yield from linear(op, [weight])


@rule("embedding", aten.embedding_dense_backward.default, kind="contracted")
def _embedding_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards for the sum of the rows' gradients.

    The result is partial over sharded indices, or for a partial incoming gradient.
    """
    grad, indices = op.operands
    counted = op.arg("scale_grad_by_freq")
    rows = "_" * indices.ndim if counted else letters(indices.ndim)
    yield from by_labels(op, [(grad, rows + "Z"), (indices, rows)], ["_Z"])
    own = _own_rows(op.output.shape[0], indices)
    if own is not None and int(op.arg("padding_idx")) < 0:
        rewrite = replace(_less(indices, own), local=("num_weights",))
        yield op.alternative({grad.index: own.shard, indices.index: own.shard}, S(0), rewrite)
    if no_larger(op.output, grad.type):
        yield from linear(op, [grad])


@rule("embedding", SPARSE_ROWS)
def _sparse_rows(op: Op) -> Iterator[Alternative]:
    """Yield shards for the rows of a sparse gradient, each with its index beside."""
    rows, indices = op.operands
    yield from by_labels(op, [(rows, "n_"), (indices, "n")], ["n_"])


@rule("embedding", *existing("_embedding_bag", "_embedding_bag_forward_only"), kind="gathered")
def _embedding_bag(op: Op) -> Iterator[Alternative]:
    """Yield a partial table only: the range of a rank's bags, which begin at `offsets`, depends on values.

    Sums and means are linear in the table. Capture decomposes bags of equal length into reads of rows, which
    may be sharded (`fxdp/capture/python/substitutes.py`).
    """
    if op.arg("mode") != _MAXIMUM and P in op.arg("weight").placements:
        yield op.alternative({0: P}, (P, *(R if t else None for t in op.outputs[1:])))


@rule("embedding", *existing("_embedding_bag_backward"), kind="gathered")
@rule("embedding", *existing("_embedding_bag_dense_backward"), kind="contracted")
def _embedding_bag_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards for the table's gradient, which sums over indices.

    Each index reads the row of its bag in a full gradient.
    """
    grad = op.arg("grad")
    if op.arg("mode") == _MAXIMUM or op.arg("scale_grad_by_freq"):
        return
    if op.target in existing("_embedding_bag_dense_backward"):
        split = [op.arg("indices"), op.arg("offset2bag"), op.arg("per_sample_weights")]
        yield from by_labels(op, [(o, "i") for o in split if o is not None], ["__"])
    if no_larger(op.output, grad.type):
        yield from linear(op, [grad])


@rule("embedding", *existing("_embedding_bag_per_sample_weights_backward"))
def _embedding_bag_weights_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards for each index's weight gradient, linear in both the row and the bag's gradient."""
    by_index = [(op.arg("indices"), "i"), (op.arg("offset2bag"), "i")]
    if op.arg("offset2bag").shape == op.arg("indices").shape:
        yield from by_labels(op, by_index, ["i"])
    yield from linear(op, [op.arg("grad")], [op.arg("weight")])
