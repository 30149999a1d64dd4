"""Ranks that run calls and backwards in different orders, or leave one out: refused with names and lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxdp
from fxdp.ranks.comms.sequence_log import SequenceLog, differing
from tests.captures import captured_once
from tests.limits import SOON_S
from tests.rank_pool import RankPool

_LEFT_OUT = "rank 1 left out the backward of call 2 of Net (called at"


class Net(nn.Sequential):
    """Its gradients travel by messages."""

    def __init__(self, width: int = 3) -> None:
        super().__init__(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


class Critic(Net):
    """Has the sizes of the other model, and another name."""


class Wide(Net):
    """Its gradients travel by gloo, where ranks share no memory."""

    def __init__(self) -> None:
        super().__init__(20_000)


def _compiled(kind: type[Net] = Net, **options: Any) -> fxdp.CompiledModule:
    return fxdp.compile(kind(), loss_fn=F.mse_loss, backend="eager", **options)


def _loss(model: fxdp.CompiledModule) -> Tensor:
    found: Tensor = model(torch.ones(2, 4), target=torch.ones(2, 2))
    return found


def _said(action: Callable[[int], object]) -> str:
    """The error that an action raises at once, given this rank."""
    began = time.monotonic()
    try:
        action(dist.get_rank())
    except fxdp.FxdpError as error:
        late = " late" if time.monotonic() - began > SOON_S else ""
        return f"{type(error).__name__}{late}: {error}"
    return "no error"


def _two_modules(rank: int) -> None:
    first, second = _compiled(), _compiled(Critic)
    losses = [_loss(first), _loss(second)]
    for loss in losses if rank else losses[::-1]:
        loss.backward()


def _two_calls(rank: int, kind: type[Net] = Net) -> None:
    model = _compiled(kind)
    losses = [_loss(model), _loss(model)]
    for loss in losses if rank else losses[::-1]:
        loss.backward()
    _loss(model)


def _by_gloo(rank: int) -> None:
    os.environ["FXDP_SHARED_MEMORY"] = "0"
    try:
        _two_calls(rank, Wide)
    finally:
        del os.environ["FXDP_SHARED_MEMORY"]


def _undefined_gradients(rank: int, **options: Any) -> None:
    model = _compiled(**options)
    _loss(model).backward()
    loss = _loss(model)
    if rank == 0:
        loss.backward()
    _loss(model).backward()


def _left_out_in_stages(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    _undefined_gradients(rank, mesh=mesh, pipeline={"microbatches": 2})


def _meant(_: int) -> None:
    """What is no fault: losses that all ranks drop, evaluation, parts of a batch, two steps under way."""
    model = _compiled()
    _loss(model)
    with torch.no_grad():
        _loss(model)
    losses = [_loss(model), _loss(model)]
    (losses[0] + losses[1]).backward()
    model.eval()
    model(torch.ones(2, 4))
    _loss(model.train()).backward()


def _faults() -> dict[str, str]:
    actions = (_meant, _two_modules, _two_calls, _by_gloo, _undefined_gradients, _left_out_in_stages, _meant)
    with captured_once():
        return {action.__name__: _said(action) for action in actions}


@pytest.fixture(scope="module")
def said(ranks: RankPool) -> list[dict[str, str]]:
    """What each rank was told."""
    found: list[dict[str, str]] = ranks.run(2, _faults)
    ranks.renew()
    return found


def test_what_all_ranks_do_alike_is_no_fault(said: list[dict[str, str]]) -> None:
    assert [found["_meant"] for found in said] == ["no error", "no error"]


def test_backwards_of_two_modules_in_another_order(said: list[dict[str, str]]) -> None:
    first, second = "the backward of call 1 of Net", "the backward of call 1 of Critic"
    for found in said:
        words = found["_two_modules"]
        assert words.startswith("AgreementError: "), words
        assert first in words
        assert second in words
        assert words.count("(called at") == 2
        assert f"(called at {__file__}:" in words
        assert "expected all ranks to make the same calls and to run their backwards in the same" in words
    assert "rank 1 came to a sum in" in said[0]["_two_modules"]
    assert "rank 0 came to a sum in" in said[1]["_two_modules"]


@pytest.mark.parametrize("way", ["_two_calls", "_by_gloo"])
def test_backwards_of_two_calls_in_another_order(said: list[dict[str, str]], way: str) -> None:
    for found in said:
        assert found[way].startswith("AgreementError: "), found[way]
        assert "the backward of call 1 of" in found[way]
        assert "the backward of call 2 of" in found[way]


def test_a_rank_that_leaves_out_a_backward(said: list[dict[str, str]]) -> None:
    for found in said:
        words = found["_undefined_gradients"]
        assert words.startswith(f"RankFailedError: {_LEFT_OUT}"), words
        assert "in which rank 0 waits for it: rank 1 is in call 3 of Net" in words


def test_a_rank_that_leaves_out_a_backward_in_stages(said: list[dict[str, str]]) -> None:
    for found in said:
        words = found["_left_out_in_stages"]
        assert words.startswith(f"AgreementError: {_LEFT_OUT}"), words
        assert "start again from the last checkpoint" in words


def _sequence_log(*moments: int) -> tuple[int, ...]:
    """Of one module: positive for calls, negative for their backwards."""
    sequence_log = SequenceLog()
    number = sequence_log.add_module("Net")
    begun: dict[int, int] = {}
    for moment in moments:
        if moment > 0:
            sequence_log.begin_call(number, moment)
            begun[moment] = sequence_log.now
        else:
            sequence_log.begin_backward(begun[-moment])
    return sequence_log.recent()


@pytest.mark.parametrize(
    ("one", "other", "parts"),
    [
        ((1, -1, 2), (1, -1, 2), None),
        ((1, -1, 2), (1, 2), 1),
        ((1, 2, -1, -2), (1, 2, -2, -1), 2),
        (tuple(range(1, 100)), tuple(range(1, 100)), None),
    ],
)
def test_where_orders_part(one: tuple[int, ...], other: tuple[int, ...], parts: int | None) -> None:
    found = differing([_sequence_log(*one), _sequence_log(*other)])
    if parts is None:
        assert found is None
    else:
        assert found == {0: _sequence_log(*one)[parts + 1], 1: _sequence_log(*other)[parts + 1]}


def test_a_moment_in_words() -> None:
    sequence_log = SequenceLog()
    number = sequence_log.add_module("Net")
    sequence_log.begin_call(number, 3)
    call = sequence_log.now
    assert sequence_log.words(call).startswith("call 3 of Net (called at ")
    sequence_log.leave_out(1 << 61 | 4)
    (_, *moments) = sequence_log.recent()
    assert (sequence_log.now, moments[-1] < 0, SequenceLog.is_backward(moments[-1])) == (call, True, False)
    assert sequence_log.words(moments[-1]) == "a backward of a loss that does not read output 2, 61"
    sequence_log.begin_backward(call)
    assert sequence_log.words(sequence_log.now).startswith("the backward of call 3 of Net (called at ")
    assert sequence_log.words(0) == "no call of a compiled module"
    sequence_log.add_module("Net")
    assert "Net (the compiled module number 1)" in sequence_log.words(call)
