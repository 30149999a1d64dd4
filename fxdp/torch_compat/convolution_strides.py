"""Of torch's fake convolutions: those of as many images as a mask takes are laid out as kernels do it.

    %some: f64[u0, 3, 8, 8] = index(%images, [%mask])      channels-last
    %made: f64[u0, 16, 2, 2] = convolution(%some, ..)      here contiguous, by kernels channels-last

Torch does not ask which kernel it is where a size has no example (2.11 to 2.13): what Inductor compiles
stops with `expected size 16==16, stride 1==4`. No kernel's layout depends on how many images there are.
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
"""Which operands have a batch."""
_SOME = 2


@contextlib.contextmanager
def convolution_strides() -> Iterator[None]:
    """Inside, fake convolutions have the strides of real ones."""
    known = fake_impls.op_implementations_dict
    with patched(Patch(known, op, _with_strides) for op in _IMAGES if op in known):
        yield


def _with_strides(plain: Callable[..., Any]) -> Callable[..., Any]:
    def convolved(mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> Any:
        images = _IMAGES[op]
        if len(args) < len(images) or not all(_only_batch_is_open(args[i]) for i in images):
            return plain(mode, op, *args, **kwargs)
        # that of all is not asked: of a gradient torch 2.11 refuses it, as the batch may be 1
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
    """A value with the strides of that of some images, for all."""
    return some.new_empty_strided((batch, *some.shape[1:]), some.stride())
