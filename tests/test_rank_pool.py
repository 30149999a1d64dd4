from __future__ import annotations

import os
import signal
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests import rank_host
from tests.limits import HANG_S, scaled
from tests.rank_pool import RankError, RankPool


def _sum_of_ranks(scale: int, plus: int = 0) -> tuple[int, int, torch.Tensor]:
    value = torch.tensor(scale * dist.get_rank())
    dist.all_reduce(value)
    return os.getpid(), int(value) + plus, torch.ones(2, dtype=torch.complex64)


def _fail_on_one() -> None:
    dist.barrier()  # else one may leave while the other joins
    if dist.get_rank() == 1:
        raise KeyError("the reason")


def _hang_on_one() -> None:
    dist.barrier()  # else rank 0 may leave while rank 1 joins
    while dist.get_rank() == 1:
        time.sleep(0.1)


def _warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def _end_in_different_ways() -> str:
    rank = int(os.environ["RANK"])
    if rank == 1:
        raise ValueError("bad luck")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    print("fine here")
    return os.environ["COLOUR"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_run_returns_results_in_rank_order(ranks: RankPool, world_size: int) -> None:
    results = ranks.run(world_size, _sum_of_ranks, 10, plus=1)
    total = 10 * sum(range(world_size)) + 1
    assert [result[1] for result in results] == [total] * world_size
    assert results[0][2].dtype is torch.complex64


def test_ranks_are_shared(ranks: RankPool) -> None:
    first = ranks.run(2, _sum_of_ranks, 1)
    second = ranks.run(2, _sum_of_ranks, 1)
    assert [item[0] for item in first] == [item[0] for item in second]


def test_error_carries_the_traceback_and_the_pool_goes_on(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"1 of 2 ranks failed(?s:.*)rank 1 raised(?s:.*)the reason"):
        ranks.run(2, _fail_on_one)
    assert ranks.run(2, _sum_of_ranks, 1)[0][1] == 1


def test_timeout_replaces_the_ranks(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1: no answer"):
        ranks.run(2, _hang_on_one, timeout=scaled(1.0))
    assert ranks.run(2, _sum_of_ranks, 1)[0][1] == 1


def test_warnings_are_errors(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="careful"):
        ranks.run(1, _warn)


def test_spawn_reports_each_end(ranks: RankPool) -> None:
    outcomes = ranks.spawn(
        3, _end_in_different_ways, init=False, launched=True, environment={"COLOUR": "blue"}
    )
    assert [outcome.status for outcome in outcomes] == [0, 1, -9]
    assert outcomes[0].result == "blue"
    assert "fine here" in outcomes[0].output
    assert "ValueError: bad luck" in outcomes[1].output


_FOUND: list[str] = []


def _find(what: str) -> None:
    _FOUND.append(what)


def _found() -> list[str]:
    return _FOUND


def test_all_ranks_know_what_was_prepared_once(ranks: RankPool) -> None:
    for what in ("one", "other", "one"):
        ranks.prepare(_find, what)
    assert ranks.run(2, _found) == [["one", "other"]] * 2


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="where there are GPUs each rank prepares by itself")
def test_what_leaves_threads_is_not_prepared(ranks: RankPool) -> None:
    end = threading.Event()
    threading.Thread(target=end.wait).start()
    try:
        reply = rank_host._prepared(ranks._task(_found, ((), {}), timeout=HANG_S, init=False))
    finally:
        end.set()
    assert "has left threads" in reply.error


def test_close_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # these ranks compile nothing
    pool = RankPool()
    pids = [item[0] for item in pool.run(2, _sum_of_ranks, 1)]
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
