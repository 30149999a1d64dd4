"""Replacements for ops whose gradients Inductor computes differently from the kernels.

Average pool with `ceil_mode=True` and `count_include_pad=True`: the last windows may extend beyond the
padding, and divide by the number of elements inside; Inductor divides by the full kernel size (torch 2.11 to
2.13). A kernel of 40 x 40 over an image of 1 x 1 gave gradients 1,600 times too small.

    input 5, kernel 2, stride 2      windows [0 1] [2 3] [4 -]      divided by 2, 2, 1

Convolution backward of an empty batch: Inductor makes the weight gradient channels-last, the kernel for empty
batches does not, and the compiled code stops with "expected size 8==8, stride 1==9" (torch 2.13 to 2.15).
This failed on ranks whose first batch was empty. All of these gradients are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxdp.torch_compat import aten


def _pool_backward(op: Any, dims: int) -> Callable[..., Tensor]:
    def backward(
        gradient: Tensor, value: Tensor, kernel: Sequence[int], stride: Sequence[int],
        padding: Sequence[int], ceil_mode: bool, count_include_pad: bool, divisor: int | None = None,
    ) -> Tensor:  # fmt: skip
        given = value, kernel, stride, padding, ceil_mode, count_include_pad
        if divisor is not None or not (ceil_mode and count_include_pad):
            return op(gradient, *given, divisor)  # type: ignore[no-any-return]
        each = zip(*(_of_each(n, dims) for n in (kernel, stride or kernel, padding)), strict=True)
        for i, (size, step, edge) in enumerate(each):
            dim = i - dims
            first = torch.arange(gradient.shape[dim], device=gradient.device) * step - edge
            inside = (value.shape[dim] + edge - first).clamp(max=size).to(gradient.dtype)
            gradient = gradient / inside.view(-1, *[1] * (dims - 1 - i))
        return op(gradient, *given, 1)  # type: ignore[no-any-return]

    return backward


def _of_no_images(
    gradient: Tensor, value: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *others: Any
) -> tuple[Tensor | None, ...]:
    """Return zero gradients, in place of `convolution_backward` for an empty batch."""
    mask: Sequence[bool] = others[-1]
    shapes = value.shape, weight.shape, bias_sizes or weight.shape[:1]
    return tuple(
        weight.new_zeros(shape) if wanted else None for shape, wanted in zip(shapes, mask, strict=True)
    )


def _is_empty(batch: Tensor) -> bool:
    """Return whether the batch is empty in this program; a symbolic size is not."""
    size = batch.shape[0]
    return isinstance(size, int) and size == 0


def _of_each(numbers: Sequence[int], dims: int) -> Sequence[int]:
    """Return one number per dim; a single number is repeated."""
    return [*numbers] * dims if len(numbers) == 1 else numbers


OVERRIDES: Mapping[Any, Callable[..., Any]] = {
    aten.avg_pool2d_backward.default: _pool_backward(aten.avg_pool2d_backward.default, 2),
    aten.avg_pool3d_backward.default: _pool_backward(aten.avg_pool3d_backward.default, 3),
    aten.convolution_backward.default: _of_no_images,
}
"""Functions to call in place of ops while a graph is traced for Inductor."""


def mended(op: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """Return the function to call in place of an op for these arguments; None to call the op itself."""
    if op is aten.convolution_backward.default and not _is_empty(args[1]):
        return None
    return OVERRIDES.get(op)
