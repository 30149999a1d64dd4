"""From what the user gives as a mesh to the data axes that the compiler works on.

    mesh=None            the world as axis dp: of the process group if there is one, else made from
                         torchrun's variables, else this process alone
    DeviceMesh           axes dp, dp_replicate, dp_shard, pp by name, as torchtitan and FSDP2 name them
    {"dp": 4}            sizes only, for plans without a process group

The data axes are one logical axis: a rank's place on it is its index along all of them, first axis slowest.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxdp.errors import MeshError, RankFailedError, StateError
from fxdp.links import Links, find_links, open_links
from fxdp.settings import Settings

__all__ = ["AXES", "DataMesh", "ensure_alive", "resolve_mesh"]

AXES = ("pp", "dp", "dp_replicate", "dp_shard")
_NOT_BUILT = ("dp_shard",)
_PIPELINE = "pp"
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

_log = logging.getLogger("fxdp")


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
    def backend(self) -> str:
        """What carries large collectives: `gloo` or `nccl`."""
        return _backend(self.device_type)

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.axes, self.sizes, strict=True))
        return f"mesh({axes})"


def resolve_mesh(
    mesh: DeviceMesh | Mapping[str, int] | None, device_type: str, settings: Settings | None = None
) -> DataMesh:
    """Turn the user's `mesh` into data axes, with everything that joins their ranks.

    All ranks of the mesh must call this at the same point: the first call makes process groups.

    Args:
        mesh: a DeviceMesh, sizes by axis name (no process group is used), or None (see the module).
        device_type: the type of the device that holds the model's parameters.
        settings: read from the environment by default.

    Raises:
        MeshError: unknown, unnamed or not yet supported axes; another device type than the model's; no
            process group; a rank outside the mesh.
        RankFailedError: another rank did not come.
    """
    settings = settings or Settings.from_environment()
    if mesh is None:
        return _resolve_world(device_type, settings)
    if isinstance(mesh, DeviceMesh):
        return _resolve_device_mesh(mesh, device_type, settings)
    if isinstance(mesh, Mapping):
        return _resolve_sizes(mesh, device_type)
    raise MeshError(
        f"mesh is a {type(mesh).__name__}; expected a torch DeviceMesh, a dict such as {{'dp': 4}} for a "
        "plan, or None for all ranks"
    )


def ensure_alive(mesh: DataMesh) -> None:
    """Check that `mesh` can still be used; cheap enough for every step.

    Raises:
        StateError: the process group was destroyed, or this rank failed inside an earlier call.
        RankFailedError: another rank has failed.
    """
    links = mesh.links
    if links is None or (links.alive and links.ending is None):
        return
    ending = links.ending
    if ending is None:
        raise StateError(
            "the process group was destroyed after this module was compiled; expected it to live as long as "
            "the module is called: call torch.distributed.destroy_process_group() last, or compile again "
            "after a new init_process_group()"
        )
    if ending.rank == mesh.rank:
        raise StateError(
            f"an earlier call stopped half-way on this rank ({ending.text.splitlines()[0]}) and the other "
            "ranks were told; compile the model again to go on"
        )
    raise RankFailedError(f"{ending}\ncompile the model again to go on, if all ranks are still there")


def _resolve_world(device_type: str, settings: Settings) -> DataMesh:
    if not dist.is_initialized() and settings.launch is not None:
        _init_process_group(device_type, settings)
    if not dist.is_initialized():
        return DataMesh(("dp",), (1,), 0, (0,), device_type)
    ranks = tuple(range(dist.get_world_size()))
    links = _links(dist.get_rank(), ranks, ranks, device_type, settings)
    return DataMesh(("dp",), (len(ranks),), dist.get_rank(), ranks, device_type, links=links)


def _init_process_group(device_type: str, settings: Settings) -> None:
    launch = settings.launch
    assert launch is not None
    backend = _backend(device_type)
    if device_type == "cuda":
        _select_device(launch.local_rank)
    _log.info("rank %d of %d: making a %s process group", launch.rank, launch.world_size, backend)
    dist.init_process_group(backend, timeout=timedelta(seconds=settings.timeout_s))


def _select_device(local_rank: int) -> None:
    if local_rank >= torch.cuda.device_count():
        raise MeshError(
            f"LOCAL_RANK is {local_rank}, but this machine has {torch.cuda.device_count()} CUDA devices; "
            "expected at most one rank per device: lower torchrun's --nproc-per-node"
        )
    torch.cuda.set_device(local_rank)


def _resolve_device_mesh(mesh: DeviceMesh, device_type: str, settings: Settings) -> DataMesh:
    if mesh.mesh_dim_names is None:
        raise MeshError(
            f"the mesh of shape {tuple(mesh.shape)} has no axis names; expected names out of "
            f"{', '.join(AXES)}: pass mesh_dim_names=('dp',) to init_device_mesh"
        )
    _check_axes(mesh.mesh_dim_names)
    if mesh.device_type != device_type:
        raise MeshError(
            f"the mesh is on {mesh.device_type}, the model's parameters are on {device_type}; expected the "
            f"same: move the model with .to('{mesh.device_type}'), or make the mesh with "
            f"init_device_mesh('{device_type}', ...)"
        )
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    here = dist.get_rank() if dist.is_initialized() else -1
    if here not in ranks:
        _refuse_outside(len(ranks), here, ranks)
    shape = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    index = max(0, ranks.index(here)) if here in ranks else 0
    data = _axes_of_rank(shape, index, device_type)
    row = tuple(ranks[i] for i in _row(shape, index))
    if here not in ranks:
        return replace(data, ranks=row, device_mesh=mesh)
    links = _links(index, ranks, row, device_type, settings)
    return replace(data, ranks=row, device_mesh=mesh, links=links)


def _axes_of_rank(shape: Mapping[str, int], index: int, device_type: str) -> DataMesh:
    """The data axes and the pipeline axis from the place of the rank with this index in the mesh."""
    axes = {name: size for name, size in shape.items() if name != _PIPELINE} or {"dp": 1}
    places = [_place(shape, i) for i in range(prod(shape.values()))]
    stage, data = places[index]
    column = tuple(places.index((p, data)) for p in range(shape.get(_PIPELINE, 1)))
    pipeline = PipelineAxis(len(column), stage, column, tuple(p[1] for p in places))
    ranks = _row(shape, index)
    return DataMesh(tuple(axes), tuple(axes.values()), data, ranks, device_type, pipeline=pipeline)


def _row(shape: Mapping[str, int], index: int) -> tuple[int, ...]:
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


def _refuse_outside(size: int, here: int, ranks: tuple[int, ...]) -> None:
    if here >= 0:
        raise MeshError(f"this is rank {here}; expected one of the mesh's ranks, {list(ranks)}")
    if size > 1:
        raise MeshError(
            f"the mesh has {size} ranks, but there is no process group; expected one: launch with torchrun, "
            "or call torch.distributed.init_process_group before fxdp.compile"
        )


def _resolve_sizes(mesh: Mapping[str, int], device_type: str) -> DataMesh:
    _check_axes(tuple(mesh))
    wrong = [f"{name}={size!r}" for name, size in mesh.items() if not isinstance(size, int) or size < 1]
    if wrong:
        raise MeshError(f"mesh sizes {', '.join(wrong)}; expected integers >= 1")
    return _axes_of_rank(dict(mesh), 0, device_type)


def _check_axes(names: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in AXES]
    if unknown or not names:
        near = {name: difflib.get_close_matches(name, AXES, n=1, cutoff=0.4) for name in unknown}
        hints = [f"{name!r}: did you mean {match[0]!r}?" for name, match in near.items() if match]
        raise MeshError(
            f"mesh axes {list(names)}: got {unknown or 'none'}, expected names out of {list(AXES)}"
            + "".join(f"\n  {hint}" for hint in hints)
            + "\n  give the axis over which the batch is split the name 'dp'"
        )
    later = [name for name in names if name in _NOT_BUILT]
    if later:
        raise MeshError(
            f"mesh axis {later[0]!r} is a valid name, but fxdp cannot use it yet; expected axes out of "
            f"{[name for name in AXES if name not in _NOT_BUILT]} in this version"
        )


def _links(
    rank: int, ranks: tuple[int, ...], row: tuple[int, ...], device_type: str, settings: Settings
) -> Links | None:
    if len(ranks) == 1 or dist.get_backend() == "fake":
        return None
    backend = _backend(device_type)
    return find_links(ranks, row, backend) or open_links(rank, ranks, row, backend, settings)


def _backend(device_type: str) -> str:
    if device_type not in _BACKENDS:
        raise MeshError(
            f"the model is on device type {device_type!r}; expected one of {sorted(_BACKENDS)}: move it there"
        )
    return _BACKENDS[device_type]


def _name(group: dist.ProcessGroup | None) -> str:
    return group.group_name if group is not None else ""
