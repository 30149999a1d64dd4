"""Turn the user's mesh into the data axes that the compiler works on.

    mesh=None            the world as axis dp: from the process group if there is one, else made from
                         torchrun's variables, else this process alone
    DeviceMesh           axes dp, dp_replicate, dp_shard, pp by name, as in torchtitan and FSDP2
    {"dp": 4}            sizes only, for plans without a process group

The data axes form one logical axis: a rank's index runs over all data axes, the first axis slowest.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxdp.errors import MeshError, RankFailedError, a_kind
from fxdp.ir.types.mesh import AXES, REGATHER, Group, Mesh, backend_of, check_axes, mesh_of
from fxdp.ranks.comms import Comms, add_group, find_comms, open_comms
from fxdp.ranks.comms.interfaces import interfaces, knows_itself_as_loopback, own_address
from fxdp.ranks.comms.row_transport import open_transport
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.settings import Settings
from fxdp.settings.launch import Launch, lead_gloo_to
from fxdp.torch_compat import PrefixStore, TCPStore, world_group

_log = logging.getLogger("fxdp")
_TRY_S = 5.0  # for one attempt to reach the store
_AGAIN_S = 0.1
_NAMED = 16  # most ranks named in an error


def init_mesh(
    mesh: DeviceMesh | Mapping[str, int] | None,
    device_type: str,
    settings: Settings | None = None,
) -> ProcessMesh:
    """Turn the user's `mesh` into data axes, with the ranks' connections and process groups.

    All ranks of the mesh must call this at the same point: the first call makes process groups.

    Parameters
    ----------
    mesh : a DeviceMesh, sizes by axis name (no process group is used), or None (see the module).
    device_type : the type of the device that holds the model's parameters.
    settings : read from the environment by default.

    Raises
    ------
    MeshError : unknown, unnamed or not yet supported axes; a device type different from the model's; no
        process group; a rank outside the mesh.
    RankFailedError : a rank did not join in time.
    """
    settings = settings or Settings.from_environment()
    if mesh is None:
        return _init_world(device_type, settings)
    if isinstance(mesh, DeviceMesh):
        return _init_device_mesh(mesh, device_type, settings)
    if isinstance(mesh, Mapping):
        return ProcessMesh(mesh_of(mesh, device_type))
    raise MeshError(
        f"mesh is {a_kind(mesh)}; expected a torch DeviceMesh, a dict such as {{'dp': 4}} for a "
        "plan, or None for all ranks"
    )


def with_shard_group(process_mesh: ProcessMesh, post_forward_size: int = 0) -> ProcessMesh:
    """Return the mesh with a process group for sharded parameters, and with a `DeviceMesh` of the ranks.

    All ranks of the mesh must call this at the same point. `post_forward_size` is the size of the groups
    that gather parameters for the backward, which need one more process group; 0: all ranks gather together.

    Raises
    ------
    RankFailedError : a rank did not join in time.
    """
    mesh, comms, device_mesh = process_mesh.mesh, process_mesh.comms, process_mesh.device_mesh
    if device_mesh is None and dist.is_initialized():
        device_mesh = init_device_mesh(mesh.device_type, mesh.sizes, mesh_dim_names=mesh.axes)
    if comms is None:
        return replace(process_mesh, device_mesh=device_mesh)
    settings, groups = Settings.from_environment(), list(mesh.groups)
    if len(mesh.axes) == 1:  # torch has made a group along each of several axes
        groups.append(Group(add_group(comms, "rows", settings).group_name, "rows"))
    if post_forward_size:
        near = next(
            each
            for each in replace(mesh, post_forward_size=post_forward_size).along(REGATHER)
            if mesh.rank in each
        )
        ranks = [mesh.ranks[place] for place in near]
        made = add_group(comms, f"{REGATHER} {post_forward_size}", settings, ranks)
        groups.append(Group(made.group_name, axis=REGATHER))
    return ProcessMesh(replace(mesh, groups=tuple(groups)), comms, device_mesh)


def _init_world(device_type: str, settings: Settings) -> ProcessMesh:
    if world_group() is None and settings.launch is not None:
        _init_process_group(device_type, settings)
    world = world_group()
    if world is None:
        return ProcessMesh(mesh_of({"dp": 1}, device_type))
    ranks = tuple(range(world.size()))
    comms = _comms(world.rank(), ranks, ranks, device_type, settings)
    return _join(mesh_of({"dp": len(ranks)}, device_type, world.rank()), comms)


def _init_process_group(device_type: str, settings: Settings) -> None:
    launch = settings.launch
    assert launch is not None
    backend = backend_of(device_type)
    if device_type == "cuda":
        _select_device(launch.local_rank)
    _log.info("rank %d of %d: making a %s process group", launch.rank, launch.world_size, backend)
    start = time.monotonic()
    if backend == "gloo" and launch.several_hosts and knows_itself_as_loopback():
        interface = interfaces().get(settings.host or own_address(launch.master_addr))
        if interface is not None:
            lead_gloo_to(interface)
    if launch.rank:  # rank 0 may have to start the store
        _wait_for_store(launch, settings.timeout_s)
    timeout = timedelta(seconds=settings.timeout_s)
    here: list[PrefixStore] = []
    try:
        here += _say_here(launch, timeout)
        _make_group(backend, launch, timeout)
    except dist.DistError as error:
        raise RankFailedError(
            f"no process group of {launch.world_size} ranks came up within {time.monotonic() - start:.0f} s"
            f"{_missing(here, launch.world_size)}; expected all of them to call fxdp.compile (set "
            f"FXDP_TIMEOUT_S if one may need longer)\ntorch: {str(error).splitlines()[0]}"
        ) from error


def _say_here(launch: Launch, timeout: timedelta) -> list[PrefixStore]:
    """Record in torchrun's store that this rank has started, because torch only counts the ranks."""
    if not launch.agent_store:  # rank 0 has yet to start one
        return []
    there = TCPStore(
        launch.master_addr, launch.master_port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    store = PrefixStore(f"fxdp/here/{launch.restarts}", there)
    store.set(str(launch.rank), "")
    return [store]


def _missing(here: Sequence[PrefixStore], size: int) -> str:
    """Return text that names the ranks that have not started, as far as the store knows."""
    with contextlib.suppress(RuntimeError):
        late = [str(rank) for store in here for rank in islice(_absent(store, range(size)), _NAMED + 1)]
        others = " and others" if len(late) > _NAMED else ""
        return f": rank {', '.join(late[:_NAMED])}{others} did not come" if late else ""
    return ""


def _absent(store: PrefixStore, ranks: range) -> Iterator[int]:
    """Yield the ranks without an entry in the store.

    Bisection keeps the load small, as all ranks ask at about the same time.
    """
    if store.check(list(map(str, ranks))):
        return
    if len(ranks) == 1:
        yield ranks[0]
        return
    half = len(ranks) // 2
    yield from _absent(store, ranks[:half])
    yield from _absent(store, ranks[half:])


def _make_group(backend: str, launch: Launch, timeout: timedelta) -> None:
    if not launch.restarts:
        dist.init_process_group(backend, timeout=timeout)
        return
    # torchrun keeps its store when it restarts ranks: gloo would call ranks that have ended
    there = TCPStore(launch.master_addr, launch.master_port, launch.world_size, False, timeout)
    store = PrefixStore(f"start {launch.restarts}", there)
    dist.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
    )


def _wait_for_store(launch: Launch, timeout_s: float) -> None:
    """Wait until the store accepts connections; torch itself would wait longer than the given timeout."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((launch.master_addr, launch.master_port), timeout=_TRY_S).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise RankFailedError(
                    f"nobody listened at MASTER_ADDR:MASTER_PORT = {launch.master_addr}:{launch.master_port} "
                    f"within {timeout_s:g} s ({error}); expected rank 0 to call fxdp.compile, and all ranks "
                    "to have its address: see rank 0's output (set FXDP_TIMEOUT_S if it may need longer)"
                ) from error
        time.sleep(_AGAIN_S)


def _select_device(local_rank: int) -> None:
    if local_rank >= torch.cuda.device_count():
        raise MeshError(
            f"LOCAL_RANK is {local_rank}, but this machine has {torch.cuda.device_count()} CUDA devices; "
            "expected at most one rank per device: lower torchrun's --nproc-per-node"
        )
    torch.cuda.set_device(local_rank)


def _init_device_mesh(mesh: DeviceMesh, device_type: str, settings: Settings) -> ProcessMesh:
    if mesh.mesh_dim_names is None:
        raise MeshError(
            f"the mesh of shape {tuple(mesh.shape)} has no axis names; expected names out of "
            f"{', '.join(AXES)}: pass mesh_dim_names=('dp',) to init_device_mesh"
        )
    check_axes(mesh.mesh_dim_names)
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
    found = mesh_of(shape, device_type, ranks.index(here) if here in ranks else 0)
    found = replace(found, ranks=tuple(ranks[i] for i in found.ranks))
    if here not in ranks:
        return ProcessMesh(found, device_mesh=mesh)
    comms = _comms(ranks.index(here), ranks, found.ranks, device_type, settings)
    return _join(found, comms, mesh)


def _join(mesh: Mesh, comms: Comms | None, device_mesh: DeviceMesh | None = None) -> ProcessMesh:
    """Return the mesh with the names of the groups in `comms`, and of the groups that torch made per axis."""
    if comms is None:
        return ProcessMesh(replace(mesh, messages=open_transport.is_extended), None, device_mesh)
    small = comms.transport.group_name
    groups = [Group(small, "messages")] if small else []
    data, reduce = comms.find("data"), comms.find("reduce")
    if data is not None and reduce is not None:
        groups += [Group(data.group_name), Group(reduce.group_name, "reduce")]
    # the groups above join a single axis; for several, torch made one each with the DeviceMesh
    if device_mesh is not None and len(mesh.axes) > 1:
        groups += [Group(device_mesh.get_group(axis).group_name, axis=axis) for axis in mesh.axes]
    found = replace(mesh, groups=tuple(groups), alike=comms.alike, **comms.transport.facts)
    return ProcessMesh(found, comms, device_mesh)


def _refuse_outside(size: int, here: int, ranks: tuple[int, ...]) -> None:
    if here >= 0:
        raise MeshError(f"this is rank {here}; expected one of the mesh's ranks, {list(ranks)}")
    if size > 1:
        raise MeshError(
            f"the mesh has {size} ranks, but there is no process group; expected one: launch with torchrun, "
            "or call torch.distributed.init_process_group before fxdp.compile"
        )


def _comms(
    rank: int, ranks: tuple[int, ...], row: tuple[int, ...], device_type: str, settings: Settings
) -> Comms | None:
    world = world_group()
    if len(ranks) == 1 or (world is not None and dist.get_backend(world) == "fake"):
        return None
    backend = backend_of(device_type)
    return find_comms(ranks, row, backend) or open_comms(rank, ranks, row, backend, settings)
