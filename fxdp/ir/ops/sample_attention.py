"""Attention within packed samples, one kernel call for samples of one length that follow one another.

A mask between all rows has a number for each pair of rows, and the kernel computes each of these pairs. Of
samples it is enough to know where each begins:

    numbers   0 0 0 1 1 1 2        rows 0 to 5: two samples of three rows; row 6: one sample of one row

The kernel is torch's for CPUs, which takes any strides but those of the last dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fxdp.ir.ops.layouts import with_rows
from fxdp.ir.ops.library import aten, opaque

_Rows = tuple[int, int, int]
"""Samples of one length: the first row, the number of samples, the rows of each."""


def _runs(numbers: Tensor) -> Iterator[_Rows]:
    lengths: list[int] = torch.unique_consecutive(numbers.flatten(), return_counts=True)[1].tolist()
    first = 0
    while lengths:
        length = lengths[0]
        count = next((i for i, other in enumerate(lengths) if other != length), len(lengths))
        yield first, count, length
        first, lengths = first + count * length, lengths[count:]


def _taken(x: Tensor, rows: _Rows) -> Tensor:
    """Return a view of a run of `[1, heads, rows, ...]`, as `[samples, heads, rows of a sample, ...]`."""
    first, count, length = rows
    taken = x[0, :, first : first + count * length]
    return taken.reshape(taken.shape[0], count, length, *taken.shape[2:]).transpose(0, 1)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, numbers: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    out, sums = _forward_like(query, key, value)
    for rows in _runs(numbers):
        found = aten._scaled_dot_product_flash_attention_for_cpu.default(
            *(with_rows(_taken(x, rows)) for x in (query, key, value)), 0.0, causal, scale=scale
        )
        for full, part in zip((out, sums), found, strict=True):
            _taken(full, rows).copy_(part)
    return out, sums


def _forward_like(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    samples, heads, rows, _ = query.shape
    out = query.new_empty(samples, rows, heads, value.shape[3]).transpose(1, 2)
    dtype = torch.promote_types(query.dtype, torch.float32)
    return out, query.new_empty(samples, rows, heads, dtype=dtype).transpose(1, 2)


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, numbers: Tensor,
    causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gradients = _backward_like(grad_out, query, key, value)
    for rows in _runs(numbers):
        taken = [with_rows(_taken(x, rows)) for x in (grad_out, query, key, value, out)]
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            *taken, _taken(sums, rows), 0.0, causal, scale=scale
        )
        for full, part in zip(gradients, found, strict=True):
            _taken(full, rows).copy_(part)
    return gradients


def _backward_like(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    def like(x: Tensor) -> Tensor:
        samples, heads, rows, features = x.shape
        return x.new_empty(samples, rows, heads, features).transpose(1, 2)

    return like(query), like(key), like(value)


_OPERANDS = "Tensor query, Tensor key, Tensor value"
_SAMPLES = "Tensor numbers, bool causal, float? scale"

ATTENTION = opaque(f"sample_attention({_OPERANDS}, {_SAMPLES}) -> (Tensor, Tensor)", _forward, _forward_like)
"""`(query, key, value [1, heads, rows, features], numbers [rows], ...)` -> output, log-sum-exps.

Rows of one number follow one another; a row attends to those of its number, if causal to earlier ones alone.
"""
ATTENTION_BACKWARD = opaque(
    f"sample_attention_backward(Tensor grad_out, {_OPERANDS}, Tensor out, Tensor sums, {_SAMPLES}) -> "
    "(Tensor, Tensor, Tensor)",
    _backward,
    _backward_like,
)
"""Returns the gradients of query, key and value."""
