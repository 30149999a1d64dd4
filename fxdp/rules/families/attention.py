"""Rules for fused scaled dot-product attention, forward and backward, for CPU and CUDA.

Law: dim 0 of query, key and value counts samples, which attend only within themselves; so it may be sharded,
together with the log-sum-exp and any mask or bias that has this dim. A mask with size 1 there is full, and
its gradient partial. Dropout inside the op (`dropout_p > 0`) draws local numbers from the seed state, which
is replicated. Rows that a mask hides from all rows of other ranks attend only to their own rank's, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from fxdp.ir.ops.empty_parts import local_op
from fxdp.ir.ops.library import aten, existing
from fxdp.ir.ops.sample_attention import ATTENTION, ATTENTION_BACKWARD
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import Placement, R, S
from fxdp.ir.types.sizes import axis, batch_factor
from fxdp.rules.dims import argument_or_none
from fxdp.rules.labels import by_labels, filled, trailing
from fxdp.rules.registry import Alternative, Op, Operand, rule

_PER_SAMPLE = ("grad_out", "grad_out_", "query", "key", "value", "out", "logsumexp")
_MASKS = ("attn_mask", "attn_bias", "bias")


def _inputs(op: Op) -> Iterator[tuple[Operand, str]]:
    for argument in op.target._schema.arguments:
        value = op.arg(argument.name)
        if not isinstance(value, Operand):
            continue
        if argument.name in _PER_SAMPLE:
            yield value, "n..."
        elif argument.name in _MASKS:
            # aligned at the last dim, like broadcasting: [q, k] and [1, h, q, k] are shared by all samples
            yield value, trailing("n___", value.ndim)


@rule(
    "attention",
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
)
def _attention(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples for output and log-sum-exp; seeds and empty results are full."""
    if op.operands[0].ndim != 4 or argument_or_none(op, "return_debug_mask"):
        return
    # The results differ by kernel: after the first two come generator states, which all ranks
    # share, lengths, and unused tensors.
    outputs: list[str | Placement] = [R for _ in op.outputs]
    outputs[0] = "n___"
    if op.outputs[1] is not None and op.outputs[1].shape:  # the log-sum-exp, if the kernel computes it
        outputs[1] = "n..."
    yield from by_labels(op, _inputs(op), outputs, broadcast=True)
    yield from _own_rows(op)


@rule(
    "attention",
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
@rule(
    "attention",
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
    kind="contracted",
)
def _attention_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples for the gradients.

    The gradient of a bias shared by all samples is partial.
    """
    if op.operands[0].ndim != 4:
        return
    # a bias without samples was added to each sample, so its gradient lacks the label: a sum of terms
    outputs = [trailing("n___", len(t.shape)) if t else "" for t in op.outputs]
    yield from by_labels(op, _inputs(op), outputs, broadcast=True)
    yield from _own_rows(op)


def _own_rows(op: Op) -> Iterator[Alternative]:
    """Yield the shard of rows that attend to rows of their own rank alone, as those of packed documents do.

    The mask says so (`Operand.blocks`); of it a rank reads the columns of its own rows. Only kernels of CPUs
    take any part of a mask: those of GPUs ask for its alignment.
    """
    if op.target not in _ON_CPU or (mask := op.arg("attn_mask")) is None or mask.blocks is None:
        return
    found, last = mask.blocks, mask.ndim - 1
    hides = found.fill == (0.0 if mask.type.dtype == torch.bool else -math.inf)
    if not hides or set(found.dims) != {last - 1, last}:
        return
    rows, chosen = axis(found.axis).total, dict[int, Placement]()
    for operand, _ in _inputs(op):
        if operand is mask:
            chosen[mask.index] = S(last - 1)
        elif operand.shape[2] == rows:  # [sample, head, row, feature], and the log-sum-exp without features
            chosen[operand.index] = S(2)
        else:
            return
    rewrite = Rewrite(
        own_columns=((mask.index, last),), axis=found.axis, target=local_op(op.target)  # a rank without rows
    )  # fmt: skip
    yield op.alternative(chosen, S(2), rewrite)


_ON_CPU = frozenset({
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
})  # fmt: skip

# Samples of different lengths in one row: the start of each is counted over the global batch, so no range of
# rows can run separately.
_RAGGED = (
    "cum_seq_q", "cum_seq_k", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "seqlen_k", "alibi_slopes",
    "block_table",
)  # fmt: skip


@rule("attention", *existing("_flash_attention_forward", "_efficient_attention_forward"))
def _attention_by_position(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples for kernels on `[samples, positions, heads, features]`, unless ragged."""
    if not _is_ragged(op):
        yield from _attention(op)


@rule("attention", *existing("_flash_attention_backward"))
@rule("attention", *existing("_efficient_attention_backward"), kind="contracted")
def _attention_by_position_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples for gradients of kernels on `[samples, positions, heads, features]`."""
    if not _is_ragged(op):
        yield from _attention_backward(op)


def _is_ragged(op: Op) -> bool:
    return any(argument_or_none(op, name) is not None for name in _RAGGED)


@rule("attention", aten.scaled_dot_product_attention.default, aten._scaled_dot_product_attention_math.default)
def _composite_attention(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples for attention that is not decomposed yet.

    All operands must have equal rank and number of samples. For one query and no keys torch returns one row,
    even for an empty part.
    """
    query, key, value = op.operands[:3]
    if not query.ndim == key.ndim == value.ndim >= 3:
        return
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return
    samples = filled("n...", query.ndim)
    inputs = [(o, trailing(samples, o.ndim)) for o in op.operands]
    yield from by_labels(op, inputs, samples, broadcast=True)


@rule("attention", ATTENTION, ATTENTION_BACKWARD)
def _sample_attention(op: Op) -> Iterator[Alternative]:
    """Yield the shard of rows: those of one sample, which attend to one another, are on one rank."""
    rows = op.arg("query").shape[2]
    numbers = op.arg("numbers")
    if batch_factor(rows) != 1:
        return
    shards: dict[int, Placement] = {operand.index: S(2) for operand in op.operands}
    yield op.alternative({**shards, numbers.index: S(numbers.shape.index(rows))}, S(2))
