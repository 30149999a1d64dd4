"""Memory-efficient attention on a GPU, with a bias aligned as the kernel requires.

torch pads a bias before it calls the kernel, so that each row begins at an aligned address; a graph contains
the kernel alone. Between the two a program may have gathered the bias from ranks, without the padding:

    bias [2, 2, 6, 6]    strides 96, 96, 16, 1    as torch pads it
                         strides 72, 36, 6, 1     gathered: "attn_bias is not correctly aligned"

Inductor pads it anew; programs that run op by op call the functions of this file.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from fxdp.ir.ops.library import aten

_ALIGNED = 16
"""The number of elements to which torch pads (`pad_bias` in `native/transformers/attention.cpp`)."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, *args: Any, **options: Any
) -> Any:
    """Attend with an aligned bias; operands `[samples, heads, positions, features]`."""
    return aten._scaled_dot_product_efficient_attention.default(
        query, key, value, _aligned(attn_bias), *args, **options
    )


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    *args: Any,
    **options: Any,
) -> Any:
    """Return the gradients of `attend`."""
    return aten._scaled_dot_product_efficient_attention_backward.default(
        grad_out, query, key, value, _aligned(attn_bias), *args, **options
    )


def _aligned(bias: Tensor | None) -> Tensor | None:
    """Return a bias with strides that are multiples of `_ALIGNED`; an aligned one is not copied."""
    if bias is None or not bias.numel():
        return bias
    strides = [stride for size, stride in zip(bias.shape[:-1], bias.stride()[:-1], strict=True) if size > 1]
    if bias.stride(-1) == 1 and not any(stride % _ALIGNED for stride in strides):
        return bias
    length = bias.shape[-1]
    return F.pad(bias.contiguous(), (0, -length % _ALIGNED))[..., :length]
