"""Of torch's DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = ["dtensor_spec", "local_shard"]


def dtensor_spec(
    mesh: DeviceMesh, placements: Sequence[tuple[str, int, int]], shape: Sequence[int], dtype: torch.dtype
) -> Any:
    """A `DTensorSpec`, one placement per mesh axis: `("R", 0, 1)`, `("P(sum)", 0, 1)`, `("S", dim, outer)`"""
    from torch.distributed.tensor import Partial, Placement, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard

    def spelled(kind: str, dim: int, outer: int) -> Placement:
        if kind != "S":
            return Replicate() if kind == "R" else Partial(kind[2:-1])
        return Shard(dim) if outer == 1 else _StridedShard(dim, split_factor=outer)

    # a spec wants strides, which a program has for its own ranks only: those of the contiguous whole
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensorSpec(
        mesh, tuple(spelled(*p) for p in placements), tensor_meta=TensorMeta(size, stride, dtype)
    )


def local_shard(tensor: DTensor) -> torch.Tensor:
    """What this rank holds of a `DTensor`: the very tensor; `to_local()` may make a view at each call."""
    return tensor._local_tensor
