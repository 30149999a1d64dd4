"""Collectives under way go on together, and nobody waits for what others say later than they must."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from fxdp.ranks.comms.messages import Messages
from fxdp.transport.in_flight import InFlight, Step
from fxdp.transport.shared_memory import SharedMemory
from tests.limits import HANG_S
from tests.ranks.comms.test_messages import _ranks
from tests.ranks.tree.small_trees import together


def _steps(said: list[str], name: str, count: int) -> Step:
    def step() -> Step | None:
        said.append(f"{name}{count}")
        return _steps(said, name, count - 1) if count > 1 else None

    return step


def test_each_goes_on_when_the_next_starts_and_all_when_one_is_waited_for() -> None:
    said, in_flight = list[str](), InFlight()
    begun = []
    for name, count in (("a", 3), ("b", 1), ("c", 3), ("d", 2)):
        in_flight.go_on()
        begun.append(in_flight.begin(_steps(said, name, count)))
        said.append("|")
    assert " ".join(said) == "| a3 | a2 b1 | a1 c3 |"
    in_flight.finish(begun[3])
    assert " ".join(said) == "| a3 | a2 b1 | a1 c3 | c2 d2 c1 d1"
    in_flight.finish(begun[0])
    assert [one.step for one in begun] == [None] * 4


def test_one_that_fails_is_not_finished() -> None:
    def fails() -> None:
        raise ValueError("no")

    in_flight = InFlight()
    begun = in_flight.begin(fails)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            in_flight.finish(begun)


@pytest.mark.parametrize("direct", [False, True])
def test_a_rank_need_not_wait_for_one_that_is_one_start_behind(direct: bool) -> None:
    """Rank 0 starts its second sum while rank 1 has only started the first."""
    started = threading.Event(), threading.Event()

    def action(messages: Messages, memory: SharedMemory) -> bool:
        values = [torch.full((50_000,), float(messages.rank + 1 + i)) for i in range(3)]
        begun = [memory.start(values[0], torch.add)]
        started[messages.rank].set()
        if messages.rank == 1:
            assert started[0].wait(HANG_S)
            assert second.wait(HANG_S)
        else:
            assert started[1].wait(HANG_S)
        begun.append(memory.start(values[1], torch.add))
        second.set()
        begun.append(memory.start(values[2], torch.add))
        memory.finish(begun[-1])
        return [value[0].item() for value in values] == [3.0, 5.0, 7.0] and all(
            one.step is None for one in begun
        )

    second = threading.Event()
    with _ranks(2) as messages:
        memories = [SharedMemory(one, 2, direct) for one in messages]
        ranks = [partial(action, one, memory) for one, memory in zip(messages, memories, strict=True)]
        assert together(ranks, lambda run: run()) == [True, True]
        for memory in memories:
            memory.close()
