"""A collective of torch's own that waits in vain: all ranks hear who is late, and where that one is."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fxdp.errors import RankFailedError
from fxdp.ranks.liveness.failure import broadcast_all, guard
from fxdp.ranks.mesh_init import init_mesh
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.settings import Settings
from tests.limits import HANG_S, scaled
from tests.rank_pool import RankPool

_LATE = 2


def _sleep_elsewhere(process_mesh: ProcessMesh) -> None:
    end = time.monotonic() + HANG_S
    while process_mesh.comms.liveness.departure is None and time.monotonic() < end:
        time.sleep(0.1)


def _hear(process_mesh: ProcessMesh, late: Any, others: Any) -> str:
    """What this rank is told; the late one does another thing than the others."""
    try:
        with guard(process_mesh):
            (late if process_mesh.mesh.rank == _LATE else others)()
    except RankFailedError as error:
        return str(error)
    return "nothing"


def _late_in_every_way(folder: Path) -> list[str]:
    short = Settings(timeout_s=scaled(3.0))
    effects = []
    for way in ("elsewhere", "another collective", "stopped"):
        process_mesh = init_mesh(None, "cpu", short)
        value = torch.ones(1000)

        def reduce(process_mesh: ProcessMesh = process_mesh, value: torch.Tensor = value) -> None:
            dist.all_reduce(value, group=process_mesh.comms.find("data"))

        def late(
            way: str = way, process_mesh: ProcessMesh = process_mesh, value: torch.Tensor = value
        ) -> None:
            if way == "elsewhere":
                _sleep_elsewhere(process_mesh)
            elif way == "another collective":
                dist.all_reduce(value, group=process_mesh.comms.find("reduce"))
            else:
                (folder / "stopped").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)

        effects.append(_hear(process_mesh, late, reduce))
    _end_the_stopped_one(folder)
    return effects


def _end_the_stopped_one(folder: Path) -> None:
    """When all others have heard; nobody waits for what would not end by itself."""
    (folder / f"heard {dist.get_rank()}").touch()
    if all((folder / f"heard {rank}").exists() for rank in range(_LATE)):
        with contextlib.suppress(ProcessLookupError):  # the other one may see that, too
            os.kill(int((folder / "stopped").read_text()), signal.SIGKILL)


def _check(effects: list[str]) -> None:
    elsewhere, another, stopped = effects
    assert "rank 2 did not come to a collective in time\n  rank 2 is at " in elsewhere
    assert "in _sleep_elsewhere (in no call of a compiled module)\nexpected all ranks" in elsewhere
    assert "rank 2 waits for a collective: another one than the others\n  rank 2 is at" in another
    assert "called at" in another
    assert "test_stragglers.py" in another
    assert "rank 2 did not come to a collective in time and did not answer where it is" in stopped


def test_all_hear_who_is_late_and_where(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.spawn(3, _late_in_every_way, tmp_path)
    for outcome in outcomes[:_LATE]:
        _check(outcome.result or [outcome.output])


def test_they_hear_it_through_a_tree(ranks: RankPool) -> None:
    outcomes = ranks.spawn(4, _late_by_tree, environment={"FXDP_TREE_ABOVE": "1"})
    for rank in (0, 1, 3):
        assert "rank 2 did not come to a collective in time\n  rank 2 is at " in outcomes[rank].result


def _late_by_tree() -> str:
    process_mesh = init_mesh(None, "cpu", Settings(timeout_s=scaled(2.0), tree_above=1))
    value = torch.ones(1000)
    group = process_mesh.comms.find("data")
    return _hear(
        process_mesh, lambda: _sleep_elsewhere(process_mesh), lambda: dist.all_reduce(value, group=group)
    )


def _own_collective() -> list[str]:
    """A collective that fxdp knows nothing of, outside of its calls."""
    process_mesh = init_mesh(None, "cpu")
    group = dist.new_group(timeout=timedelta(seconds=scaled(2.0)))
    if process_mesh.mesh.rank == _LATE:
        _sleep_elsewhere(process_mesh)
        return [str(process_mesh.comms.control.words(process_mesh.comms.liveness.departure))]
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except RuntimeError as error:
        broadcast_all(error)
        return list(error.__notes__)
    return []


def test_an_error_of_a_collective_of_the_users_says_who_is_at_fault(ranks: RankPool) -> None:
    outcomes = ranks.spawn(3, _own_collective)
    for outcome in outcomes:
        assert "rank 2 did not come to a collective in time" in "".join(outcome.result), outcome.output
