"""Ops whose gradients Inductor computes otherwise than their kernels, spelled so that it does not.

The gradient of an average pool with `ceil_mode=True` and `count_include_pad=True`: the last windows may end
beyond the padding, and count what lies within; Inductor divides by all of the kernel's size (torch 2.11 to
2.13). A kernel of 40 x 40 over an image of 1 x 1 gave gradients 1,600 times too small.

    input 5, kernel 2, stride 2      windows [0 1] [2 3] [4 -]      divided by 2, 2, 1

The backward of a convolution of no images: Inductor lays its weights' gradient out channels-last, the kernel
for empty batches does not, and the compiled code stops with "expected size 8==8, stride 1==9" (torch 2.13 to
2.15). A rank whose first batch was empty failed so. All of these gradients are zero.
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
    """The gradients of a convolution of an empty batch, in place of `convolution_backward`."""
    mask: Sequence[bool] = others[-1]
    shapes = value.shape, weight.shape, bias_sizes or weight.shape[:1]
    return tuple(
        weight.new_zeros(shape) if wanted else None for shape, wanted in zip(shapes, mask, strict=True)
    )


def _is_empty(batch: Tensor) -> bool:
    """Whether the batch of this very program is empty; a size that is open is none."""
    size = batch.shape[0]
    return isinstance(size, int) and size == 0


def _of_each(numbers: Sequence[int], dims: int) -> Sequence[int]:
    """One for each dim, of which one stands for all."""
    return [*numbers] * dims if len(numbers) == 1 else numbers


OVERRIDES: Mapping[Any, Callable[..., Any]] = {
    aten.avg_pool2d_backward.default: _pool_backward(aten.avg_pool2d_backward.default, 2),
    aten.avg_pool3d_backward.default: _pool_backward(aten.avg_pool3d_backward.default, 3),
    aten.convolution_backward.default: _of_no_images,
}
"""What is called in an op's place while a graph is traced for Inductor."""


def mended(op: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """What is called in the op's place with these arguments; None if it is right as it is."""
    if op is aten.convolution_backward.default and not _is_empty(args[1]):
        return None
    return OVERRIDES.get(op)
