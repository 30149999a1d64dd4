from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxdp.ranks.liveness.interrupt
import fxdp.ranks.liveness.liveness
from fxdp.errors import RankFailedError, StateError
from fxdp.ranks.agreement import Agreement
from fxdp.ranks.hooks import install_hook
from fxdp.ranks.liveness.failure import _describe, convert, guard, report_errors
from fxdp.ranks.mesh_init import init_mesh
from fxdp.ranks.process_mesh import ProcessMesh
from tests.limits import HANG_S, SOON_S, scaled
from tests.rank_pool import Outcome, RankPool


def _wait(process_mesh: ProcessMesh, where: str) -> None:
    """Wait for the other ranks inside a compiled call, in one of the places where that can happen."""
    with guard(process_mesh):
        if where == "exchange":
            Agreement(process_mesh).exchange([1])
        if where in ("functional", "messages"):
            name = process_mesh.mesh.group("messages") if where == "messages" else process_mesh.mesh.group()
            for _ in range(2):
                pending = torch.ops._c10d_functional.all_reduce(torch.ones(1000), "sum", name)
                torch.ops._c10d_functional.wait_tensor(pending)
        if where == "reduce":
            work = dist.all_reduce(torch.ones(4), group=process_mesh.comms.find("reduce"), async_op=True)
            assert work is not None
            work.wait()
        if where == "asleep":
            _sleep_and_tidy_up()
        if where == "stuck":  # in a group of the user's, which fxdp does not cut
            dist.recv(torch.ones(1), src=1)
        if where == "python":
            time.sleep(scaled(1.0))
            Agreement(process_mesh).exchange([1])


def _sleep_and_tidy_up() -> None:
    try:
        with contextlib.suppress(Exception):  # code that catches all errors, as a compiler does
            time.sleep(HANG_S)
        while True:
            pass
    finally:
        print("tidied up")


def _fail(process_mesh: ProcessMesh, how: str) -> None:
    if how == "raises inside":
        with guard(process_mesh):
            pending = dist.all_reduce(torch.ones(1000), group=process_mesh.comms.find("data"), async_op=True)  # noqa: F841
            raise ValueError("the reason")
    if how == "raises outside":
        raise ValueError("the reason")
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "is interrupted":
        raise KeyboardInterrupt
    if how == "catches it and stays":
        try:
            _fail(process_mesh, "raises inside")
        except ValueError:
            time.sleep(scaled(1.5))
    if how == "raises and stays":
        with contextlib.suppress(ValueError):
            _fail(process_mesh, "raises inside")
        time.sleep(scaled(4.0))
    if how == "is terminated":  # while it waits in C++, where Python handles no signal
        threading.Timer(scaled(0.3), os.kill, (os.getpid(), signal.SIGTERM)).start()
        dist.recv(torch.ones(1), src=0)


def _train(how: str, where: str, guilty: int) -> None:
    install_hook()
    process_mesh = init_mesh(None, "cpu")
    fxdp.ranks.liveness.interrupt._AGAIN_S = scaled(0.5)
    fxdp.ranks.liveness.liveness._GRACE_S = scaled(0.5)
    fxdp.ranks.liveness.liveness._STUCK_S = scaled(1.0 if where == "stuck" else 5.0)
    for _ in range(3):
        _wait(process_mesh, "functional")
    if process_mesh.mesh.rank == guilty:
        time.sleep(scaled(0.3))
        _fail(process_mesh, how)
        return
    _wait(process_mesh, where)
    raise AssertionError("this rank was not stopped")


def _check(outcomes: list[Outcome], guilty: int, words: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.seconds < SOON_S
        if rank != guilty:
            assert outcome.status == 1, outcome.output
            assert f"RankFailedError: rank {guilty} {words}" in outcome.output, outcome.output


@pytest.mark.parametrize(
    ("how", "where"),
    [
        *(("raises inside", where) for where in ("exchange", "functional", "messages", "reduce", "python")),
        # the same words come, however it fails; connections that end at each place: by a kill, below
        ("raises outside", "exchange"),
        ("raises outside", "functional"),
        ("catches it and stays", "messages"),
        ("catches it and stays", "reduce"),
    ],
)
def test_a_rank_that_raises_stops_the_other(ranks: RankPool, how: str, where: str) -> None:
    outcomes = ranks.spawn(2, _train, how, where, 1)
    _check(outcomes, 1, "failed: ValueError: the reason")
    if how != "catches it and stays":
        assert outcomes[1].status == 1
        assert "ValueError: the reason" in outcomes[1].output
        assert "RankFailedError" not in outcomes[1].output
    assert "in _fail" in outcomes[0].output


@pytest.mark.parametrize("where", ["exchange", "functional", "messages", "reduce", "python"])
def test_a_rank_that_is_killed_stops_the_other(ranks: RankPool, where: str) -> None:
    outcomes = ranks.spawn(2, _train, "is killed", where, 1)
    _check(outcomes, 1, "ended without an error message (killed?")


def test_a_rank_that_is_interrupted_stops_the_other(ranks: RankPool) -> None:
    _check(ranks.spawn(2, _train, "is interrupted", "reduce", 1), 1, "failed: KeyboardInterrupt")


@pytest.mark.parametrize(("how", "words"), [("raises inside", "failed: ValueError"), ("is killed", "ended")])
def test_rank_zero_that_hosts_the_store(ranks: RankPool, how: str, words: str) -> None:
    outcomes = ranks.spawn(2, _train, how, "functional", 0, init=False, launched=True)
    _check(outcomes, 0, words)


@pytest.mark.parametrize("how", ["raises outside", "is killed"])
def test_all_of_four_stop_with_the_first_cause(ranks: RankPool, how: str) -> None:
    words = "failed: ValueError" if how == "raises outside" else "ended without an error message"
    _check(ranks.spawn(4, _train, how, "reduce", 2), 2, words)


def test_python_code_gets_the_error_as_an_exception(ranks: RankPool) -> None:
    """Asleep in a system call, then in a loop that nothing else would end."""
    outcomes = ranks.spawn(2, _train, "raises outside", "asleep", 1)
    _check(outcomes, 1, "failed: ValueError: the reason")
    assert "tidied up" in outcomes[0].output
    assert "in _sleep_and_tidy_up" in outcomes[0].output


def test_a_collective_that_never_ends_ends_the_process(ranks: RankPool) -> None:
    outcomes = ranks.spawn(2, _train, "raises and stays", "stuck", 1)
    _check(outcomes, 1, "failed: ValueError: the reason")
    assert f"was still waiting in a collective {scaled(1.0):g} s later" in outcomes[0].output


def test_a_rank_that_is_terminated_says_so(ranks: RankPool) -> None:
    outcomes = ranks.spawn(2, _train, "is terminated", "functional", 1)
    _check(outcomes, 1, "failed: it was ended by SIGTERM")
    assert outcomes[1].status == -signal.SIGTERM
    assert outcomes[0].seconds >= outcomes[1].seconds - 0.1, "torchrun blames who ends first"


def _raise_before_compile() -> None:
    if dist.get_rank() == 1:
        time.sleep(scaled(0.5))
        raise ValueError("no data here")
    init_mesh(None, "cpu")


def test_an_error_before_compile_reaches_those_who_wait(ranks: RankPool) -> None:
    outcomes = ranks.spawn(2, _raise_before_compile)
    assert "rank 1 failed: ValueError: no data here" in outcomes[0].output
    assert outcomes[0].seconds - outcomes[1].seconds < SOON_S


def _end_early() -> None:
    fxdp.ranks.liveness.liveness._CAUSE_S = scaled(1.0)
    process_mesh = init_mesh(None, "cpu")
    _wait(process_mesh, "functional")
    if process_mesh.mesh.rank == 0:
        _wait(process_mesh, "exchange")


def test_a_rank_with_fewer_steps(ranks: RankPool) -> None:
    first, second = ranks.spawn(2, _end_early)
    assert second.status == 0, second.output
    assert first.status == 1
    assert "rank 1 ended its process while this rank still needed it" in first.output


def _leave(begun: bool) -> None:
    fxdp.ranks.liveness.liveness._LEAVE_S = scaled(0.5)
    process_mesh = init_mesh(None, "cpu")
    assert process_mesh.comms is not None
    if process_mesh.mesh.rank == 1 and not begun:
        return
    with guard(process_mesh):
        process_mesh.comms.sequence_log.begin_call(1, 1)
        end = time.monotonic() + scaled(4.0)
        while process_mesh.mesh.rank == 0 and time.monotonic() < end:
            pass


@pytest.mark.parametrize("begun", [True, False])
def test_a_rank_that_left_is_missed_only_in_what_it_has_not_begun(ranks: RankPool, begun: bool) -> None:
    first, second = ranks.spawn(2, _leave, begun)
    assert second.status == 0, second.output
    assert first.status == (0 if begun else 1), first.output
    if not begun:
        assert "RankFailedError: rank 1 ended its process while this rank still needed it" in first.output


def _same_error() -> list[str]:
    process_mesh = init_mesh(None, "cpu")
    messages = []
    for _ in range(2):
        try:
            with guard(process_mesh):
                Agreement(process_mesh).exchange([1])
                raise ValueError(f"bad batch of rank {process_mesh.mesh.rank}")
        except (ValueError, StateError, RankFailedError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_each_rank_keeps_its_own_error(ranks: RankPool) -> None:
    for rank, (first, again) in enumerate(ranks.run(2, _same_error)):
        assert first.startswith(f"ValueError: bad batch of rank {rank}")
        assert "compile the model again" in again


def _go_on() -> list[int]:
    """A failed call that every rank catches; then the model is compiled again."""
    lengths = []
    for _ in range(2):
        process_mesh = init_mesh(None, "cpu")
        try:
            with guard(process_mesh):
                Agreement(process_mesh).exchange([1])
                if process_mesh.mesh.rank == 0:
                    raise ValueError("half-way")
                _wait(process_mesh, "reduce")
        except (ValueError, RankFailedError):
            lengths.append(len(Agreement(init_mesh(None, "cpu")).exchange([1])))
    return lengths


def test_compile_again_after_a_failure(ranks: RankPool) -> None:
    assert ranks.run(2, _go_on) == [[2, 2], [2, 2]]


def _report() -> Any:
    process_mesh = init_mesh(None, "cpu")
    try:
        if process_mesh.mesh.rank == 0:
            with report_errors():
                raise KeyError("in the user's loop")
        _wait(process_mesh, "exchange")
    except (KeyError, RankFailedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "no error"


def test_report_errors(ranks: RankPool) -> None:
    first, second = ranks.run(2, _report)
    assert first == 'KeyError: "in the user\'s loop"'
    assert second == 'RankFailedError: rank 0 failed: KeyError: "in the user\'s loop"'


def _late() -> tuple[str, float]:
    fxdp.ranks.liveness.liveness._CAUSE_S = HANG_S  # nobody waits for news of a rank that is named already
    process_mesh = init_mesh(None, "cpu")
    begin = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(scaled(3.0))
        return "slept", 0.0
    try:
        _wait(process_mesh, "exchange")
    except RankFailedError as error:
        return str(error), time.monotonic() - begin
    return "no error", 0.0


def test_a_rank_that_does_not_come(ranks: RankPool) -> None:
    outcomes = ranks.spawn(2, _late, environment={"FXDP_TIMEOUT_S": str(scaled(1.0))})
    words, seconds = outcomes[0].result
    assert f"rank 1 did not come within {scaled(1.0):g} s, though its process is alive" in words
    assert seconds < SOON_S


def test_describe_has_message_and_frames() -> None:
    try:
        _fail(None, "raises outside")  # type: ignore[arg-type]
    except ValueError as error:
        text = _describe(error)
    assert text.startswith("ValueError: the reason\n")
    assert "in _fail" in text


def test_guard_without_ranks_leaves_errors_alone() -> None:
    with pytest.raises(ValueError, match="mine"), guard(init_mesh(None, "cpu")):
        raise ValueError("mine")


def test_of_two_ranks_the_other_one_is_late() -> None:
    control = SimpleNamespace(names=["4", "7 (host b)"])
    liveness = SimpleNamespace(cause=lambda: None, late=lambda: None, departure=None)
    comms: Any = SimpleNamespace(liveness=liveness, ranks=(4, 7), rank=0, control=control)
    late = str(convert(comms, RuntimeError("gloo: Timed out waiting 6000ms for recv operation")))
    assert late.startswith("rank 7 (host b) did not come to a collective in time")
    assert "all ranks seem to be alive: broken" in str(convert(comms, RuntimeError("broken")))
