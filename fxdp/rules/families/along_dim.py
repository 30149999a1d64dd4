"""Ops that work along one or a few dims and leave all other dims alone: softmax, cumsum, sort, flip, glu.

Law: every dim that the op does not name may be sharded, alike on all operands and results; the named
dims must be full. The linear ones keep sums of terms. Softmax has recipes for a sharded named dim
(`families/softmax.py`); sort, topk and the cumulative ops gather it.
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
def along(op: Op) -> Iterator[Alternative]:
    """One operand, worked on along `dim`."""
    yield from together(op, _named(op))


@rule("along-dim", aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def softmax(op: Op) -> Iterator[Alternative]:
    """Shares along `dim`, or their logarithms."""
    yield from together(op, _named(op))
    yield from in_parts(op, _named(op), softmax_in_parts)


@rule("along-dim", aten.cumsum.default)
def cumsum(op: Op) -> Iterator[Alternative]:
    """Sums of leading parts; linear, unless each number is rounded to another dtype first.

    Along the batch a rank's sums need those of all ranks before it, which is no redistribution: gathered.
    """
    yield from together(op, _named(op))
    if widens(op.operands[0].type.dtype, op.output.dtype):
        yield from linear(op, op.operands)


@rule("along-dim", aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(op: Op) -> Iterator[Alternative]:
    """The gradient and the saved value agree on the other dims; linear in the gradient."""
    yield from together(op, _named(op))
    yield from linear(op, op.operands[:1])
    yield from in_parts(op, _named(op), softmax_backward_in_parts)


@rule("along-dim", aten.glu_backward.default)
def gradient_along(op: Op) -> Iterator[Alternative]:
    """The gradient and the saved value agree on the other dims; linear in the gradient."""
    yield from together(op, _named(op))
    yield from linear(op, op.operands[:1])


@rule("along-dim", *existing("_masked_softmax", "_masked_softmax_backward"))
def masked_softmax(op: Op) -> Iterator[Alternative]:
    """Softmax of what a mask of the same shape leaves, or its gradient; other masks keep all full."""
    if op.arg("dim") is not None and len({o.shape for o in op.operands}) == 1:
        yield from together(op, _named(op))
        if op.target in existing("_masked_softmax_backward"):
            yield from linear(op, op.operands[:1])


@rule("along-dim", aten.flip.default, aten.rot90.default)
def flip(op: Op) -> Iterator[Alternative]:
    """The order of elements is reversed along dims, or a plane of two dims is turned; linear."""
    yield from together(op, _named(op, "dims"))
    yield from linear(op, op.operands)


@rule("along-dim", aten.roll.default)
def roll(op: Op) -> Iterator[Alternative]:
    """Elements are shifted around along dims, or over all of them as one; linear."""
    if op.arg("dims"):  # without them the last element of a row moves into the next: no dim is left alone
        yield from together(op, _named(op, "dims"))
    yield from linear(op, op.operands)


@rule("along-dim", aten.renorm.default)
def renorm(op: Op) -> Iterator[Alternative]:
    """The norm of each slice along `dim` is bounded: a slice must be full, so only `dim` may be sharded."""
    (named,) = _named(op)
    for shard in offered(op.operands):
        if shard.dim == named:
            yield op.alternative({0: shard}, shard)
