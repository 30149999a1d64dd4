"""Ops that a rank runs in place of torch's where torch refuses or mistakes a part without samples.

MKL fails on an empty Fourier transform, and eager `pixel_unshuffle` keeps an empty input's shape. The
ops of the `fxdp` library have the same schemas, do as torch does, and know the empty case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._ops import OpOverload

from fxdp.rules.registry import aten

_LIBRARY = torch.library.Library("fxdp", "FRAGMENT")  # type: ignore[no-untyped-call]

_LOCAL: dict[OpOverload, OpOverload] = {}


def local_op(target: OpOverload) -> OpOverload:
    """The op that does what `target` does, on empty parts too."""
    return _LOCAL[target]


def _library_op(
    target: OpOverload, function: Callable[..., torch.Tensor], shape: Callable[..., torch.Tensor]
) -> None:
    name = target._schema.name.removeprefix("aten::").removeprefix("_")
    _LIBRARY.define(name + str(target._schema).removeprefix(target._schema.name))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fxdp::{name}", shape, lib=_LIBRARY)
    _LOCAL[target] = getattr(torch.ops.fxdp, name).default


def _complex(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.complex32)


def _c2c_shape(self: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> torch.Tensor:
    return torch.empty_like(self)


def _r2c_shape(self: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> torch.Tensor:
    shape = list(self.shape)
    if onesided:
        shape[dim[-1]] = shape[dim[-1]] // 2 + 1
    return self.new_empty(shape, dtype=_complex(self.dtype))


def _c2r_shape(
    self: torch.Tensor, dim: Sequence[int], normalization: int, last_dim_size: int
) -> torch.Tensor:
    shape = list(self.shape)
    shape[dim[-1]] = last_dim_size
    return self.new_empty(shape, dtype=self.dtype.to_real())


def _unshuffled_shape(self: torch.Tensor, downscale_factor: int) -> torch.Tensor:
    r = downscale_factor
    *lead, channels, height, width = self.shape
    return self.new_empty([*lead, channels * r * r, height // r, width // r])


def _or_empty(target: OpOverload, shape: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(self: torch.Tensor, *args: object) -> torch.Tensor:
        result: torch.Tensor = shape(self, *args) if self.numel() == 0 else target(self, *args)
        return result

    return run


for _target, _shape in (
    (aten._fft_c2c.default, _c2c_shape),
    (aten._fft_r2c.default, _r2c_shape),
    (aten._fft_c2r.default, _c2r_shape),
    (aten.pixel_unshuffle.default, _unshuffled_shape),
):
    _library_op(_target, _or_empty(_target, _shape), _shape)
