"""The type of a global tensor: dtype, global shape and strides, device and layout, interned."""

from __future__ import annotations

from functools import lru_cache

import torch

from fxdp.eager.batch_axis import Layout
from fxdp.errors import PlacementError
from fxdp.ir.types.placements import Shard
from fxdp.ir.types.sizes import B
from fxdp.ir.types.value_types import TensorType

_SPECS = 1 << 16


class GlobalSpec:
    """The type of a global tensor; `spec_of` returns equal types as one object, hashed by identity.

    `stride` has the strides of one device: `reshape` and the order of random numbers follow from them.
    `metadata` has the arguments with which torch makes a wrapper.
    """

    __slots__ = ("axis", "device", "dtype", "layout", "metadata", "placement", "shape", "stride", "type")

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], device: torch.device,
        layout: Layout,
    ) -> None:  # fmt: skip
        self.dtype, self.shape, self.stride, self.device, self.layout = dtype, shape, stride, device, layout
        self.axis, self.placement = layout.axis, layout.placement
        self.type = sharded_type(dtype, shape, layout)
        self.metadata = (shape, stride, None, None, dtype, torch.strided, device)


@lru_cache(maxsize=_SPECS)
def spec_of(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], device: torch.device, layout: Layout
) -> GlobalSpec:
    """Return the one spec with these properties."""
    return GlobalSpec(dtype, shape, stride, device, layout)


def sharded_type(dtype: torch.dtype, shape: tuple[int, ...], layout: Layout) -> TensorType:
    """Return the type with the sharded dim in `B`: `[8, 3]` as `S(0)` of 8 samples becomes `[B, 3]`.

    Raises
    ------
    PlacementError : the sharded dim is no multiple of the batch.
    """
    placement = layout.placement
    if not isinstance(placement, Shard):
        return TensorType(dtype, shape)
    factor, rest = divmod(shape[placement.dim], layout.axis.total)
    if rest:
        raise PlacementError(f"a value of shape {shape} cannot be {layout}; this is a bug in a rule")
    return TensorType(dtype, (*shape[: placement.dim], factor * B, *shape[placement.dim + 1 :]))


def dense_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))
