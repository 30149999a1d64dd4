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
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxdp.errors import MeshError, RankFailedError, StateError
from fxdp.ranks.data_mesh import DataMesh, axes_of_rank, backend_of, row_of
from fxdp.ranks.links import Links, find_links, open_links
from fxdp.settings import Settings

__all__ = ["AXES", "DataMesh", "ensure_alive", "resolve_mesh"]

AXES = ("pp", "dp", "dp_replicate", "dp_shard")
_NOT_BUILT = ("dp_shard",)

_log = logging.getLogger("fxdp")


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
    backend = backend_of(device_type)
    if device_type == "cuda":
        _select_device(launch.local_rank)
    _log.info("rank %d of %d: making a %s process group", launch.rank, launch.world_size, backend)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=settings.timeout_s))
    except dist.DistError as error:
        raise RankFailedError(
            f"no process group of {launch.world_size} ranks came up within {settings.timeout_s:g} s; "
            "expected all of them to call fxdp.compile (set FXDP_TIMEOUT_S if one may need longer)\n"
            f"torch: {str(error).splitlines()[0]}"
        ) from error


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
    data = axes_of_rank(shape, index, device_type)
    row = tuple(ranks[i] for i in row_of(shape, index))
    if here not in ranks:
        return replace(data, ranks=row, device_mesh=mesh)
    links = _links(index, ranks, row, device_type, settings)
    return replace(data, ranks=row, device_mesh=mesh, links=links)


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
    return axes_of_rank(dict(mesh), 0, device_type)


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
    backend = backend_of(device_type)
    return find_links(ranks, row, backend) or open_links(rank, ranks, row, backend, settings)
