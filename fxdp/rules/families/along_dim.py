"""Rules for ops along one or a few dims, such as softmax, cumsum, sort, flip and glu.

Law: every dim that the op does not name may be sharded, equally on all operands and results; the named dims
must be full. Linear ops pass partial values on. Softmax has decompositions for a sharded named dim
(`families/softmax.py`); for sort, topk and the cumulative ops the dim is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.library import aten, existing
from fxdp.rules.builder import in_parts
from fxdp.rules.dims import offered, together, widens, wrap_all
from fxdp.rules.families.softmax import softmax_backward_in_parts, softmax_in_parts
from fxdp.rules.labels import linear
from fxdp.rules.registry import Alternative, Op, rule


def _named(op: Op, name: str = "dim") -> frozenset[int]:
    return wrap_all(op.arg(name), op.operands[0].ndim)


@rule(
    "along-dim",
    aten.cumprod.default, aten.cummax.default, aten.cummin.default, aten.logcumsumexp.default,
    aten._logcumsumexp.default, aten.sort.default, aten.sort.stable, aten.topk.default, aten.glu.default,
)  # fmt: skip
def _along(op: Op) -> Iterator[Alternative]:
    """Yield shards of all dims except `dim`, for one operand."""
    yield from together(op, _named(op))


@rule("along-dim", aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def _softmax(op: Op) -> Iterator[Alternative]:
    """Yield shards for softmax and its logarithm along `dim`."""
    yield from together(op, _named(op))
    yield from in_parts(op, _named(op), softmax_in_parts)


@rule("along-dim", aten.cumsum.default)
def _cumsum(op: Op) -> Iterator[Alternative]:
    """Yield shards of all dims except `dim`; cumsum is linear unless it casts and rounds first.

    Along a sharded dim, a rank needs the sums of all previous ranks, which no redistribution provides.
    """
    yield from together(op, _named(op))
    if widens(op.operands[0].type.dtype, op.output.dtype):
        yield from linear(op, op.operands)


@rule("along-dim", aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards of all dims except `dim`, equal for gradient and saved value; linear in the gradient."""
    yield from together(op, _named(op))
    yield from linear(op, op.operands[:1])
    yield from in_parts(op, _named(op), softmax_backward_in_parts)


@rule("along-dim", aten.glu_backward.default)
def _gradient_along(op: Op) -> Iterator[Alternative]:
    """Yield shards of all dims except `dim`, equal for gradient and saved value; linear in the gradient."""
    yield from together(op, _named(op))
    yield from linear(op, op.operands[:1])


@rule("along-dim", *existing("_masked_softmax", "_masked_softmax_backward"))
def _masked_softmax(op: Op) -> Iterator[Alternative]:
    """Yield shards for softmax with a mask of equal shape, or its gradient.

    With a mask of a different shape, all values must be full.
    """
    if op.arg("dim") is not None and len({o.shape for o in op.operands}) == 1:
        yield from together(op, _named(op))
        if op.target in existing("_masked_softmax_backward"):
            yield from linear(op, op.operands[:1])


@rule("along-dim", aten.flip.default, aten.rot90.default)
def _flip(op: Op) -> Iterator[Alternative]:
    """Yield shards of all dims except `dims`, which are reversed or rotated; linear."""
    yield from together(op, _named(op, "dims"))
    yield from linear(op, op.operands)


@rule("along-dim", aten.roll.default)
def _roll(op: Op) -> Iterator[Alternative]:
    """Yield shards of all dims except `dims`, along which elements are shifted; linear."""
    if op.arg("dims"):  # without dims, the last element of a row moves into the next row
        yield from together(op, _named(op, "dims"))
    yield from linear(op, op.operands)


@rule("along-dim", aten.renorm.default)
def _renorm(op: Op) -> Iterator[Alternative]:
    """Yield shards of `dim` only: the norm of each slice is bounded, so slices must be full."""
    (named,) = _named(op)
    for shard in offered(op.operands):
        if shard.dim == named:
            yield op.alternative({0: shard}, shard)
