"""Correct the dtype of log-sum-exps of torch's fake attention on CPU: in float64 the kernel returns float64.

    %sums: f64[2, 2, 6] = getitem(%attention, 1)      before torch 2.13 fake ones are f32

Code compiled by Inductor passes the log-sum-exps on to the gradient unchanged, or in a copy read as float32.
The gradient then stops with `expected scalar type Double but found Float`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._decomp import meta_table
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxdp.torch_compat.operators import release_before
from fxdp.torch_compat.patch import Patch, around, patched
from fxdp.torch_compat.torch_ops import aten

__all__ = ["attention_sums"]

_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


@contextlib.contextmanager
def attention_sums() -> Iterator[None]:
    """Make fake attention return log-sum-exps of the kernel's dtype inside the block."""
    with patched(_PATCHES if release_before(2, 13) else ()):
        yield


def _not_kept(plain: Callable[..., None], mode: FakeTensorMode, func: Any, *args: Any) -> None:
    # torch caches fake results until the process ends, for all threads: without the bypass, a thread that
    # captures and a thread that does not would read each other's dtype
    if func is _ATTENTION:
        raise fake_tensor._BypassDispatchCache("its sums have another dtype")
    plain(mode, func, *args)


def _left_to_torch(*args: Any, **kwargs: Any) -> Any:
    """Return `NotImplemented`, so that a thread that captures nothing falls back to torch's default."""
    return NotImplemented


def _attention(mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    with mode:
        out, sums = meta_table[op](*args, **kwargs)
        return out, sums.double() if out.dtype == torch.float64 else sums


_PATCHES = (
    Patch(fake_impls.op_implementations_dict, _ATTENTION, lambda _: _attention, _left_to_torch),
    Patch(FakeTensorMode, "_validate_cache_key", around(_not_kept)),
)
