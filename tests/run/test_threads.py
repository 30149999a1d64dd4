"""Threads of a script: batches are compared at the end, tasks on them done at once, errors end all."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fxdp.eager.data_ranks import data_ranks
from fxdp.errors import FxdpError, InputError, StateError
from fxdp.run import rank
from fxdp.run.generators import share
from fxdp.run.loaders import GlobalBatches, compare_apart
from fxdp.run.session import RunOptions, Session
from fxdp.run.threads import thread_patches
from fxdp.torch_compat import patched_everywhere
from tests.rank_pool import RankPool

_DIVIDED = "integer division or modulo by zero"


def _fetched(orders: list[list[int]]) -> tuple[list[Any], str]:
    """Fetch batches of the numbers below some by a thread; return their values and the error."""
    ranks = data_ranks(None, "cpu")
    session = Session(ranks, RunOptions(""))
    batches = GlobalBatches(iter([torch.arange(1.0, n) for n in orders[ranks.rank]]), DataLoader([]), session)
    found: list[Any] = []
    thread = threading.Thread(target=found.extend, args=(batches,))
    thread.start()
    thread.join()
    try:
        compare_apart(session)
    except FxdpError as error:
        return [], f"{type(error).__name__}: {error}"
    return [batch.full().tolist() for batch in found], ""


def test_batches_of_a_thread_are_compared_at_the_end(ranks: RankPool) -> None:
    for values, error in ranks.run(2, _fetched, [[4, 2], [4, 2]]):
        assert (values, error) == ([[1, 2, 3], [1]], "")
    for _, error in ranks.run(2, _fetched, [[4, 2], [4, 3, 5]]):
        assert error.startswith(f"{InputError.__name__}: Thread-")
        assert "rank 1 had another batch" in error


def _here(value: Any = None) -> tuple[bool, Any]:
    """Return whether this is the main thread, and a tensor's values."""
    return threading.current_thread() is threading.main_thread(), value and value["x"].tolist()


def _handed_over() -> list[Any]:
    session = Session(data_ranks(None, "cpu"), RunOptions(""))
    share(session.ranks)
    batch = {"x": next(GlobalBatches(iter([torch.arange(3)]), DataLoader([]), session))}
    tasks = (partial(_here, batch), lambda: _here(batch), _here, lambda: 1 // int(batch["x"][0]))
    with patched_everywhere(thread_patches()), ThreadPoolExecutor(1) as pool:
        *done, failed = [pool.submit(task) for task in tasks]
        return [*(each.result() for each in done), repr(failed.exception())]


def test_tasks_on_global_tensors_are_done_at_once(ranks: RankPool) -> None:
    values = (True, [0, 1, 2])
    for found in ranks.run(2, _handed_over):
        assert found == [values, values, (False, None), repr(ZeroDivisionError(_DIVIDED))]


@pytest.mark.parametrize(("error", "ends"), [(StateError("two threads"), [1]), (ValueError("x"), [])])
def test_an_error_of_ours_in_a_thread_ends_the_rank(
    error: Exception, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    codes: list[int] = []
    monkeypatch.setattr(rank, "end_at_once", codes.append)
    failed = threading.ExceptHookArgs((type(error), error, None, None))
    rank._thread_failed(shown.append, failed)
    assert (shown, codes) == ([failed], ends)
