"""Of torch's fake attention on CPU: in float64 its log-sum-exps are float64, as those of the kernel are.

    %sums: f64[2, 2, 6] = getitem(%attention, 1)      before torch 2.13 fake ones are f32

What Inductor compiles passes them on to the gradient untouched, or in a copy that reads them as float32:
the gradient stops with `expected scalar type Double but found Float`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._decomp import meta_table
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxdp.torch_compat.operators import release_before
from fxdp.torch_compat.torch_ops import aten

__all__ = ["attention_sums"]

_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


@contextlib.contextmanager
def attention_sums() -> Iterator[None]:
    """Inside, fake attention gives sums of the kernel's dtype; other threads share it."""
    if not release_before(2, 13):
        yield
        return
    validate = FakeTensorMode._validate_cache_key

    def not_kept(mode: FakeTensorMode, func: Any, *args: Any) -> None:
        # torch keeps fake results for as long as the process lives: what others got would be ours
        if func is _ATTENTION:
            raise fake_tensor._BypassDispatchCache("its sums have another dtype")
        validate(mode, func, *args)

    with (
        mock.patch.dict(fake_impls.op_implementations_dict, {_ATTENTION: _attention}),
        mock.patch.object(FakeTensorMode, "_validate_cache_key", not_kept),
    ):
        yield


def _attention(mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    with mode:
        out, sums = meta_table[op](*args, **kwargs)
        return out, sums.double() if out.dtype == torch.float64 else sums
