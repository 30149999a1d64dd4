"""Rules for ops that create a value of a given shape.

Law: a constant fill is equal on any part, so a factory with a batch dim is local for free. `new_*` reads only
dtype and device of its operand, in any placement. `*_like` reads its operand's *local* shape: the result is
sharded like the operand, and replicated if the operand has the full value's shape, even as a partial value.
Values that depend on their position (`arange`, `eye`) are full; slicing a rank's part costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.library import aten
from fxdp.ir.types.placements import P, R, Shard
from fxdp.ir.types.sizes import batch_factor, mentions_batch
from fxdp.rules.registry import Alternative, Op, rule, runs_replicated


@rule(
    "factory",
    aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format,
    aten.empty_strided.default, aten.empty_permuted.default,
    aten.new_full.default, aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default,
    aten.new_empty_strided.default,
)  # fmt: skip
def _filled(op: Op) -> Iterator[Alternative]:
    """Yield any shard for a constant of an explicit size; an operand, if any, is not read."""
    unread = {o.index: None for o in op.operands}
    if op.operands:
        yield op.alternative(unread, R)
    if op.target in (aten.empty_strided.default, aten.new_empty_strided.default) and any(
        mentions_batch(stride) for stride in op.arg("stride")
    ):
        return
    for operand in op.operands:  # gradients begin as zeros, sharded like the operand
        for shard in operand.shards:
            at = slice(shard.dim, shard.dim + 1)
            if operand.shape[at] == op.output.shape[at]:
                yield op.alternative(unread, shard)
    for dim, size in enumerate(op.output.shape):
        if batch_factor(size) is not None:
            yield op.alternative(unread, Shard(dim))


@rule(
    "factory",
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    aten.fill.Scalar, aten.zero.default,
)  # fmt: skip
def filled_like(op: Op) -> Iterator[Alternative]:
    """Yield the operand's shards for a constant of equal shape; a partial operand gives a full result."""
    x = op.operands[0]
    for shard in x.shards:
        yield op.alternative({x.index: shard}, shard)
    if P in x.placements:
        yield op.alternative({x.index: P}, R)


# values that depend on their position are computed in full
runs_replicated(
    "numbered", "factory",
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.range.default, aten.range.step,
    aten.eye.default, aten.eye.m, aten.scalar_tensor.default, aten.linspace, aten.logspace,
    aten.tril_indices.default, aten.triu_indices.default, aten.hann_window, aten.hamming_window,
    aten.blackman_window, aten.bartlett_window, aten.kaiser_window, aten.fft_fftfreq.default,
    aten.fft_rfftfreq.default,
)  # fmt: skip
