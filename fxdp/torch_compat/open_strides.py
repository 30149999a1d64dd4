"""Of torch's views: a stride that the data decides is not asked what it equals.

    %last: f64[4, 1, 16], strides (16*(u0//4), 16, 1)   of each sample's rows that a mask takes the last
    %view: f64[4, 16], strides (16*(u0//4), 1)          needs no answer to `16*(u0//4) != 16`

Inductor knows this way for sizes that the data decides, and takes it where a size is one, not where only a
stride is (2.13): the view raises and nothing is compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch._subclasses import fake_impls
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxdp.torch_compat.patch import Patch, around, patched

__all__ = ["open_strides"]

_NAME = "_compute_stride"


@contextlib.contextmanager
def open_strides() -> Iterator[None]:
    """Inside, views of values with such strides are as those of values with such sizes."""
    has_it = hasattr(fake_impls, _NAME)  # else a torch that computes them elsewhere
    with patched((Patch(fake_impls, _NAME, around(_computed)),) if has_it else ()):
        yield


def _computed(
    plain: Callable[..., Any], old_shape: Sequence[Any], old_stride: Sequence[Any], new_shape: Sequence[Any],
    size_oblivious: bool = False,
) -> Any:  # fmt: skip
    open_ = size_oblivious or bool(free_unbacked_symbols(list(old_stride)))
    return plain(old_shape, old_stride, new_shape, size_oblivious=open_)
