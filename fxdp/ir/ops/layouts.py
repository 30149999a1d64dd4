"""Kernels that depend on the strides of an operand, and the ops that give an operand these strides.

The strides of a value may differ from the strides at capture. Gathered values are contiguous, and with one
sample the strides of the batch dim mean nothing, so that

    [4, 8, 5, 3] in channels_last + [4, 8, 5, 3] in rows    -> channels_last
    [1, 8, 5, 3] in channels_last + [1, 8, 5, 3] in rows    -> neither of both, to a kernel that asks

Eager calls `contiguous()` before such kernels, which for the captured batch did nothing and left no trace.
With different strides, some kernels raise; most compute wrong numbers. The table was found by running every
op with a rule on operands of different strides, which `tests/ir/ops/test_layouts.py` repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fxdp.ir.ops.library import aten, composed, existing
from fxdp.torch_compat import OpOverload, suggest_memory_format


def _in_format(self: Tensor) -> Tensor:
    return _in_format_of(self, self)


def _in_format_of(self: Tensor, other: Tensor) -> Tensor:
    # CUDA kernels know one format, CPU kernels also the format that the strides resemble most
    on_cpu = other.device.type == "cpu"
    return self.contiguous(memory_format=suggest_memory_format(other) if on_cpu else torch.contiguous_format)


def with_rows(self: Tensor) -> Tensor:
    """Return a tensor with a contiguous last dim, the same one if it has that."""
    return self if self.stride(-1) == 1 else self.contiguous()


_in_order = aten.contiguous.default
"""Returns a contiguous value."""
in_format = composed("in_format(Tensor(a) self) -> Tensor(a)", _in_format)
"""Returns a value contiguous in one of torch's memory formats, the one that the operand resembles."""
in_format_of = composed("in_format_of(Tensor(a) self, Tensor other) -> Tensor(a)", _in_format_of)
"""Returns a value contiguous in the memory format of a second value."""
in_rows = composed("in_rows(Tensor(a) self) -> Tensor(a)", with_rows)
"""Returns a value with a contiguous last dim."""

_How: TypeAlias = "tuple[OpOverload, str]"
"""The op that restrides an argument, and the name of the argument whose format it takes, if any."""


def _first_of(name: str) -> str:
    """Return the name of an op's first argument in the installed torch."""
    return next((op._schema.arguments[0].name for op in existing(name)), "")


_INDICES = ("indices", "offsets", "offset2bag", "bag_size", "maximum_indices")
_IN_ORDER: dict[str, tuple[str, ...]] = {
    "_embedding_bag": _INDICES,
    "_embedding_bag_forward_only": _INDICES,
    "_embedding_bag_backward": _INDICES,
    "_embedding_bag_dense_backward": _INDICES,
    "_embedding_bag_per_sample_weights_backward": _INDICES,
    "_masked_softmax": ("self", "mask"),
    "_pdist_forward": ("self",),
    "_pdist_backward": (_first_of("_pdist_backward"), "self", "pdist"),  # torch 2.14 renamed it
    "_weight_norm_interface": ("v", "g"),
    "_weight_norm_interface_backward": ("grad_w", "saved_v", "saved_g", "saved_norms"),
    "adaptive_max_pool3d_backward": ("indices",),
    "conv_tbc": ("self",),
    "fractional_max_pool2d_backward": ("indices",),
    "fractional_max_pool3d_backward": ("indices",),
    "isin.Scalar_Tensor": ("test_elements",),
    "linalg_matrix_exp": ("self",),
    "native_layer_norm_backward": ("mean", "rstd"),
    "nll_loss2d_backward": ("self",),
    "view.dtype": ("self",),
    "view_as_complex": ("self",),
    "view_as_complex_copy": ("self",),
}
_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")


def _table() -> Iterator[tuple[OpOverload, Mapping[str, _How]]]:
    order, format_, rows = (_in_order, ""), (in_format, ""), (in_rows, "")
    for name, arguments in _IN_ORDER.items():
        yield from ((op, dict.fromkeys(arguments, order)) for op in existing(name))
    yield aten.native_group_norm.default, {"input": format_, "weight": order, "bias": order}
    yield (
        aten.native_group_norm_backward.default,
        {
            "input": format_,
            "grad_out": (in_format_of, "input"),
            **dict.fromkeys(("mean", "rstd", "weight"), order),
        },
    )
    for kernel in _ATTENTION:
        for op in existing(f"_scaled_dot_product_{kernel}", f"_scaled_dot_product_{kernel}_backward"):
            yield op, dict.fromkeys(("query", "key", "value", "out"), rows)


READ_AS_THEY_LIE: Mapping[OpOverload, Mapping[str, _How]] = dict(_table())
"""Arguments of each op on whose strides the kernel depends, with the op that restrides each."""


def lay_out(
    target: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    lay: Callable[..., Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments, with `lay(op, value, ...)` for each whose strides matter."""
    branches = READ_AS_THEY_LIE.get(target)
    if branches is None:
        return args, dict(kwargs)
    names = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    laid: dict[str, Any] = {}
    for name, (how, like) in branches.items():  # an argument precedes the ones that take its format
        if given.get(name) is not None:
            laid[name] = lay(how, given[name], *([laid[like]] if like else []))
    new = tuple(laid.get(name, value) for name, value in zip(names, args, strict=False))
    return new, {name: laid.get(name, value) for name, value in kwargs.items()}


def arguments_in_format(
    target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments, tensors instead of nodes, with the strides on which the kernel depends."""
    return lay_out(target, args, kwargs, lambda how, *values: how(*values))
