"""Of torch's DTensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx.passes.shape_prop import TensorMetadata

__all__ = ["dtensor_spec", "local_shard", "mesh_on_paper", "tensor_metadata"]


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


def mesh_on_paper(
    device_type: str, ranks: Sequence[int], shape: Mapping[str, int], rank: int
) -> DeviceMesh:
    """A mesh that joins nobody: without a process group torch makes it, but asks for this rank's number."""
    places = torch.tensor(ranks, dtype=torch.int).reshape(tuple(shape.values()))
    return DeviceMesh(device_type, places, mesh_dim_names=tuple(shape), _init_backend=False, _rank=rank)


def tensor_metadata(spec: Any) -> TensorMetadata:
    """What `print_readable()` shows of a spec: the whole tensor's dtype and shape."""
    shape, stride, dtype = spec.tensor_meta
    return TensorMetadata(shape, dtype, False, stride, None, False, {})
