from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxdp.errors import MeshError, RankFailedError, StateError
from fxdp.ranks.mesh_init import _missing, init_mesh
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.settings import Settings
from fxdp.settings.launch import Launch
from fxdp.torch_compat import PrefixStore
from tests.limits import scaled
from tests.rank_pool import RankPool


def _message(call: Callable[[], Any], kind: type[Exception] = MeshError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"


# -- without a process group -------------------------------------------------------------------------------


def test_alone_is_world_size_one() -> None:
    process_mesh = init_mesh(None, "cpu")
    mesh = process_mesh.mesh
    assert (mesh.axes, mesh.sizes, mesh.size, mesh.rank) == (("dp",), (1,), 1, 0)
    assert process_mesh.comms is None
    assert mesh.group() == ""
    process_mesh.check_alive()


def test_sizes_for_a_plan() -> None:
    process_mesh = init_mesh({"dp_replicate": 2, "dp": 3}, "meta")
    mesh = process_mesh.mesh
    assert (mesh.size, mesh.rank, mesh.ranks, process_mesh.comms) == (6, 0, tuple(range(6)), None)
    assert str(mesh) == "mesh(dp_replicate=2, dp=3)"


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"ddp": 2}, ["got ['ddp']", "expected names out of ['pp', 'dp',", "'ddp': did you mean 'dp'?"]),
        ({"dp_replica": 2}, ["did you mean 'dp_replicate'?"]),
        ({"tensor": 2}, ["got ['tensor']", "the name 'dp'"]),
        ({}, ["got none"]),
        ({"dp_shared": 2}, ["did you mean 'dp_shard'?"]),
        ({"dp": 0}, ["dp=0", "expected integers >= 1"]),
        ({"dp": 2.0}, ["dp=2.0"]),
        (4, ["mesh is an int; expected a torch DeviceMesh"]),
    ],
)
def test_bad_mesh(mesh: Any, words: list[str]) -> None:
    message = _message(lambda: init_mesh(mesh, "cpu"))
    for word in words:
        assert word in message


def test_a_rank_0_that_never_comes_is_named_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    settings = Settings(Launch(1, 2, 1, "127.0.0.1", port), timeout_s=scaled(0.3))
    message = _message(lambda: init_mesh(None, "cpu", settings), RankFailedError)
    assert f"nobody listened at MASTER_ADDR:MASTER_PORT = 127.0.0.1:{port} within" in message
    assert f"within {scaled(0.3):g} s" in message
    assert "see rank 0's output" in message


def test_a_rank_that_torchrun_has_started_and_that_never_comes_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}"}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "FXDP_TIMEOUT_S": str(scaled(0.5))}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    message = _message(lambda: init_mesh(None, "cpu"), RankFailedError)
    assert "no process group of 2 ranks came up within" in message
    assert ": rank 1 did not come; expected all of them to call fxdp.compile" in message


def test_of_many_that_are_missing_the_first_are_named() -> None:
    store = PrefixStore("here", dist.HashStore())
    assert _missing([], 100) == ""
    for rank in set(range(100)) - {3, *range(40, 80)}:
        store.set(str(rank), "")
    named = ", ".join(map(str, [3, *range(40, 55)]))
    assert _missing([store], 100) == f": rank {named} and others did not come"
    assert _missing([store], 45) == ": rank 3, 40, 41, 42, 43, 44 did not come"
    assert _missing([store], 3) == ""


# -- on ranks ----------------------------------------------------------------------------------------------


def _describe(process_mesh: ProcessMesh) -> tuple[Any, ...]:
    mesh, comms = process_mesh.mesh, process_mesh.comms
    groups = () if comms is None else (comms.find("data"), comms.find("reduce"))
    sizes = [group.size() for group in groups if group is not None]
    return mesh.axes, mesh.size, mesh.rank, mesh.ranks, sizes, mesh.group() != mesh.group("reduce")


def _init_world() -> tuple[Any, ...]:
    process_mesh = init_mesh(None, "cpu")
    assert init_mesh(None, "cpu").comms is process_mesh.comms, "links are made once"
    process_mesh.check_alive()
    return _describe(process_mesh)


def _resolve_two_axes() -> tuple[Any, ...]:
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp"))
    return _describe(init_mesh(device_mesh, "cpu"))


def _sums_along_axes() -> list[float]:
    """Sums of the ranks' numbers by the names of groups: along each axis, and along both."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp"))
    mesh, ops = init_mesh(device_mesh, "cpu").mesh, torch.ops._c10d_functional
    found = []
    for axis in ("dp_replicate", "dp", None):
        value = torch.tensor([10.0 ** dist.get_rank()])
        found.append(ops.wait_tensor(ops.all_reduce(value, "sum", mesh.group(axis=axis))).item())
    return found


def _resolve_part() -> tuple[Any, ...]:
    parts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "dp"))
    return _describe(init_mesh(parts["dp"], "cpu"))


def _beside_groups_of_the_user() -> list[float]:
    """Sums over this rank's row, its column and all, among groups that the user makes on some ranks."""
    rank, found = dist.get_rank(), []
    corners = dist.new_group([0, 3])
    full = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp"))
    if rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    for part in (full["dp_replicate"], full["dp"], full):
        mesh, ops = init_mesh(part, "cpu").mesh, torch.ops._c10d_functional
        if rank in (0, 3):
            dist.new_group([0, 3], use_local_synchronization=True)
        for name in (mesh.group(), mesh.group("reduce"), mesh.group("messages")):
            pending = ops.all_reduce(torch.tensor([10.0**rank]), "sum", name)
            found.append(ops.wait_tensor(pending).item())
    if rank in (0, 3):
        dist.all_reduce(torch.ones(1), group=corners)
    return found


def _in_reverse() -> list[Any]:
    """A mesh whose ranks are not in order: their places in groups are those in the mesh."""
    process_mesh, ops = init_mesh(DeviceMesh("cpu", [2, 0, 1], mesh_dim_names=("dp",)), "cpu"), torch.ops
    parts = []
    for name in (process_mesh.mesh.group(), process_mesh.mesh.group("messages")):
        own = torch.tensor([dist.get_rank()])
        pending = ops._c10d_functional.all_gather_into_tensor(own, 3, name)
        parts.append(ops._c10d_functional.wait_tensor(pending).tolist())
    return parts


def _wrong_meshes() -> list[str]:
    plain = init_device_mesh("cpu", (2,))
    named = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    good = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return [
        _message(lambda: init_mesh(plain, "cpu")),
        _message(lambda: init_mesh(named, "cpu")),
        _message(lambda: init_mesh(good, "cuda")),
        _message(lambda: init_mesh(None, "xla")),
    ]


def _destroy() -> list[str]:
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    mesh = init_mesh(device_mesh, "cpu")
    dist.destroy_process_group()
    return [
        _message(mesh.check_alive, StateError),
        _message(lambda: init_mesh(device_mesh, "cpu")),
    ]


def _from_torchrun() -> tuple[Any, ...]:
    assert not dist.is_initialized()
    mesh = init_mesh(None, "cpu")
    assert dist.get_backend() == "gloo"
    return _describe(mesh)


def _destroy_and_begin_again(folder: Path) -> list[Any]:
    """Rank 1 begins again after rank 0 has ended: torch would let it join the store that is about to end."""
    sizes = []
    for number in range(2):
        process_mesh = init_mesh(None, "cpu")
        assert process_mesh.comms is not None
        sizes.append(len(process_mesh.comms.control.exchange(b"x")))
        dist.destroy_process_group()
        ended = folder / str(number)
        if process_mesh.mesh.rank == 0:
            ended.touch()
        while not ended.exists():
            time.sleep(0.01)
    return sizes


def test_world(ranks: RankPool) -> None:
    expected = [(("dp",), 2, rank, (0, 1), [2, 2], True) for rank in range(2)]
    assert ranks.run(2, _init_world) == expected


def test_two_axes_are_flattened(ranks: RankPool) -> None:
    results = ranks.run(4, _resolve_two_axes)
    assert results == [(("dp_replicate", "dp"), 4, rank, (0, 1, 2, 3), [4, 4], True) for rank in range(4)]


def test_each_axis_has_a_group(ranks: RankPool) -> None:
    assert ranks.run(4, _sums_along_axes) == [
        [101, 11, 1111],
        [1010, 11, 1111],
        [101, 1100, 1111],
        [1010, 1100, 1111],
    ]


def test_mesh_over_a_part_of_the_world(ranks: RankPool) -> None:
    results = ranks.run(4, _resolve_part)
    assert [result[3] for result in results] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [result[2] for result in results] == [0, 1, 0, 1]


def test_rows_columns_and_the_whole_beside_groups_of_the_user(ranks: RankPool) -> None:
    column, row = [[101, 1010], [11, 1100]]
    assert ranks.run(4, _beside_groups_of_the_user) == [
        [column[rank % 2]] * 3 + [row[rank // 2]] * 3 + [1111] * 3 for rank in range(4)
    ]


def test_places_in_groups_are_those_in_the_mesh(ranks: RankPool) -> None:
    assert ranks.run(3, _in_reverse) == [[[2, 0, 1]] * 2] * 3


def test_wrong_meshes(ranks: RankPool) -> None:
    unnamed, unknown, device, backend = ranks.run(2, _wrong_meshes)[0]
    assert "has no axis names" in unnamed
    assert "mesh_dim_names=('dp',)" in unnamed
    assert "got ['data']" in unknown
    assert "the mesh is on cpu, the model's parameters are on cuda" in device
    assert "device type 'xla'; expected one of ['cpu', 'cuda']" in backend


def test_after_destroy(ranks: RankPool) -> None:
    state, mesh = ranks.run(2, _destroy)[0]
    assert "the process group was destroyed after this module was compiled" in state
    assert "the mesh has 2 ranks, but there is no process group" in mesh


def test_torchrun_variables_make_a_process_group(ranks: RankPool) -> None:
    outcomes = ranks.spawn(2, _from_torchrun, init=False, launched=True)
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes[0].output
    assert [outcome.result[:3] for outcome in outcomes] == [(("dp",), 2, rank) for rank in range(2)]


def test_links_of_a_second_process_group_on_the_same_address(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.spawn(2, _destroy_and_begin_again, tmp_path, init=False, launched=True)
    assert [outcome.result for outcome in outcomes] == [[2, 2], [2, 2]], outcomes[0].output
