"""Allow torch's views of values whose strides depend on data.

    %last: f64[4, 1, 16], strides (16*(u0//4), 16, 1)   the last of the rows that a mask selects per sample
    %view: f64[4, 16], strides (16*(u0//4), 1)          possible without deciding `16*(u0//4) != 16`

Torch has a way to compute strides of views without such questions, and takes this way if a size depends on
data, but not if only a stride does (2.13): the view raises and nothing is compiled.
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
    """Compute strides of views inside the block without guards on data-dependent strides."""
    has_it = hasattr(fake_impls, _NAME)  # an unknown torch may compute strides elsewhere
    with patched((Patch(fake_impls, _NAME, around(_computed)),) if has_it else ()):
        yield


def _computed(
    plain: Callable[..., Any], old_shape: Sequence[Any], old_stride: Sequence[Any], new_shape: Sequence[Any],
    size_oblivious: bool = False,
) -> Any:  # fmt: skip
    open_ = size_oblivious or bool(free_unbacked_symbols(list(old_stride)))
    return plain(old_shape, old_stride, new_shape, size_oblivious=open_)
