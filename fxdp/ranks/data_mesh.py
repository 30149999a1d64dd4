"""The axes of a mesh seen from one rank: data axes, which are one logical axis, and the pipeline axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxdp.errors import MeshError
from fxdp.ranks.links import Links

__all__ = ["DataMesh", "PipelineAxis", "axes_of_rank", "backend_of", "row_of"]

_PIPELINE = "pp"
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class PipelineAxis:
    """The pipeline axis of a mesh, seen from one rank.

    Attributes:
        size: the number of pipeline ranks.
        rank: this rank's index along the axis.
        column: the index among all ranks of the mesh of each pipeline rank that has this rank's data.
        data_ranks: for each rank of the mesh, its index along the data axes.
    """

    size: int = 1
    rank: int = 0
    column: tuple[int, ...] = (0,)
    data_ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class DataMesh:
    """The data axes of a mesh, seen from one rank.

    Attributes:
        axes: the names of the data axes, in mesh order.
        sizes: the size of each.
        rank: this rank's index along the flattened data axes.
        ranks: the global rank at each index.
        device_type: where the model lives.
        device_mesh: the mesh that the user gave, if one.
        links: what joins the ranks; None at size 1 and for a plan without process group.
        pipeline: the pipeline axis, of size 1 if the mesh has none.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    rank: int
    ranks: tuple[int, ...]
    device_type: str
    device_mesh: DeviceMesh | None = field(default=None, repr=False)
    links: Links | None = field(default=None, repr=False, compare=False)
    pipeline: PipelineAxis = PipelineAxis()

    @property
    def size(self) -> int:
        """The number of ranks along all data axes."""
        return prod(self.sizes)

    @property
    def world(self) -> int:
        """The number of ranks of the whole mesh."""
        return self.size * self.pipeline.size

    def in_parts(self, microbatches: int) -> DataMesh:
        """The mesh with micro-batches as one more data axis: what passes place values on."""
        return replace(self, axes=(*self.axes, "microbatch"), sizes=(*self.sizes, microbatches))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group over all data axes."""
        return self.links.group if self.links else None

    @property
    def reduce_group(self) -> dist.ProcessGroup | None:
        """A second group over the same ranks, for gradient reductions: its own stream on CUDA."""
        return self.links.reduce_group if self.links else None

    @property
    def group_name(self) -> str:
        """The name of `group` for functional collectives; empty at size 1."""
        return _name(self.group)

    @property
    def reduce_group_name(self) -> str:
        """The name of `reduce_group` for functional collectives; empty at size 1."""
        return _name(self.reduce_group)

    @property
    def message_group_name(self) -> str:
        """The name of the group for small values on CPU; empty at size 1."""
        return self.links.message_group_name if self.links else ""

    @property
    def shared_memory(self) -> bool:
        """Whether all ranks are on one host and can sum through memory that they share."""
        return self.links is not None and self.links.memory is not None

    @property
    def backend(self) -> str:
        """What carries large collectives: `gloo` or `nccl`; empty in the plan of a model on `meta`."""
        return _BACKENDS.get(self.device_type, "")

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.axes, self.sizes, strict=True))
        return f"mesh({axes})"


def axes_of_rank(shape: Mapping[str, int], index: int, device_type: str) -> DataMesh:
    """The data axes and the pipeline axis, from the place of the rank with this index in the mesh.

    `shape` are the sizes of all axes by name, in mesh order.
    """
    axes = {name: size for name, size in shape.items() if name != _PIPELINE} or {"dp": 1}
    places = [_place(shape, i) for i in range(prod(shape.values()))]
    stage, data = places[index]
    column = tuple(places.index((p, data)) for p in range(shape.get(_PIPELINE, 1)))
    pipeline = PipelineAxis(len(column), stage, column, tuple(p[1] for p in places))
    ranks = row_of(shape, index)
    return DataMesh(tuple(axes), tuple(axes.values()), data, ranks, device_type, pipeline=pipeline)


def row_of(shape: Mapping[str, int], index: int) -> tuple[int, ...]:
    """The ranks that have the same pipeline rank, by their place along the data axes."""
    stage = _place(shape, index)[0]
    return tuple(i for i in range(prod(shape.values())) if _place(shape, i)[0] == stage)


def _place(shape: Mapping[str, int], index: int) -> tuple[int, int]:
    """A rank's index along the pipeline axis, and along the flattened data axes."""
    stage, data, stride = 0, 0, 1
    for name, size in reversed(list(shape.items())):
        index, here = divmod(index, size)
        if name == _PIPELINE:
            stage = here
        else:
            data += here * stride
            stride *= size
    return stage, data


def _name(group: dist.ProcessGroup | None) -> str:
    return group.group_name if group is not None else ""


def backend_of(device_type: str) -> str:
    """The backend of process groups for a device type; `MeshError` for one that has none."""
    if device_type not in _BACKENDS:
        raise MeshError(
            f"the model is on device type {device_type!r}; expected one of {sorted(_BACKENDS)}: move it there"
        )
    return _BACKENDS[device_type]
