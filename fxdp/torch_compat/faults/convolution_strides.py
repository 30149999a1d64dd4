"""Give torch's fake convolutions the strides of the kernels if the number of images depends on data.

    %some: f64[u0, 3, 8, 8] = index(%images, [%mask])      channels-last
    %made: f64[u0, 16, 2, 2] = convolution(%some, ..)      fake: contiguous, kernel: channels-last

Torch does not look up the kernel if a size has no hint (2.11 to 2.13), and code compiled by Inductor stops
with `expected size 16==16, stride 1==4`. The memory format of a kernel never depends on the number of images.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import SymInt, Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

from fxdp.torch_compat.patch import Patch, patched
from fxdp.torch_compat.torch_ops import aten

__all__ = ["convolution_strides"]


_IMAGES = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1)}
"""Indices of the operands that have a batch dim, per op."""
_SOME = 2


@contextlib.contextmanager
def convolution_strides() -> Iterator[None]:
    """Give fake convolutions the strides of real ones inside the block."""
    known = fake_impls.op_implementations_dict
    with patched(Patch(known, op, _with_strides) for op in _IMAGES if op in known):
        yield


def _with_strides(plain: Callable[..., Any]) -> Callable[..., Any]:
    def convolved(mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> Any:
        images = _IMAGES[op]
        if len(args) < len(images) or not all(_only_batch_is_open(args[i]) for i in images):
            return plain(mode, op, *args, **kwargs)
        # the original is not called with the open batch: torch 2.11 refuses a gradient whose batch may be 1
        with mode:
            some = [_of_some(one) if i in images else one for i, one in enumerate(args)]
        like = plain(mode, op, *some, **kwargs)
        batch = args[0].shape[0]
        with mode:
            if isinstance(like, Tensor):
                return _of_all(like, batch)
            image, *others = like
            return (image if image is None else _of_all(image, batch), *others)

    return convolved


def _only_batch_is_open(image: Tensor) -> bool:
    first, *others = image.shape
    return _is_open(first) and not any(map(_is_open, [*others, *image.stride()]))


def _is_open(size: Any) -> bool:
    return isinstance(size, SymInt) and not size.node.has_hint()


def _of_some(image: Tensor) -> Tensor:
    return image.new_empty_strided((_SOME, *image.shape[1:]), image.stride())


def _of_all(some: Tensor, batch: SymInt) -> Tensor:
    """Return a value for the full batch with the strides of `some`."""
    return some.new_empty_strided((batch, *some.shape[1:]), some.stride())
