from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from fxdp.runtime.template import TangentSpec
from fxdp.runtime.undefined_gradients import UndefinedGradients

# the gradients at 0, 1, ... of what is computed for these outputs: a body, two heads, and a constant's
BEHIND = tuple(enumerate([frozenset({0, 70}), frozenset({0}), frozenset({70}), frozenset[int]()]))


def _undefined_gradients(sharded: set[int], others: Sequence[Sequence[int]] = ()) -> UndefinedGradients:
    """Of a program with outputs 0 and 70; `others` is what other ranks say that their losses leave out."""

    def exchange(own: Sequence[int]) -> Callable[[], Sequence[Sequence[int]]]:
        words = [sum(1 << i for i in left) for left in others]
        return lambda: [own, *([w & (1 << 62) - 1, w >> 62] for w in words)]

    tangents = [TangentSpec(i, torch.float32, i in sharded) for i in (0, 70)]
    return UndefinedGradients(tangents, BEHIND, exchange if others else None)


@pytest.mark.parametrize(("missing", "absent"), [((), []), ((1,), [2]), ((0,), [1]), ((0, 1), [0, 1, 2])])
def test_gradients_of_which_all_outputs_are_unread(missing: Sequence[int], absent: list[int]) -> None:
    assert list(_undefined_gradients({0, 70}).begin(frozenset(missing))()) == absent


@pytest.mark.parametrize(
    ("others", "absent"), [([{70}], [2]), ([{70}, {0}], []), ([set()], []), ([{0, 70}, {0, 70}], [2])]
)
def test_an_output_is_read_if_any_rank_s_loss_reads_it(others: list[set[int]], absent: list[int]) -> None:
    assert list(_undefined_gradients({0, 70}, [sorted(o) for o in others]).begin(frozenset({1}))()) == absent


def test_ranks_ask_each_other_only_where_that_may_decide() -> None:
    """All ask or none: also a rank whose own losses read everything."""
    asked: list[Sequence[int]] = []

    def counts(sharded: set[int], missing: set[int], behind: object = BEHIND) -> int:
        asked.clear()
        found = _undefined_gradients(sharded)
        found.behind = behind  # type: ignore[assignment]
        found.exchange = lambda own: asked.append(own) or (lambda: [own])  # type: ignore[func-returns-value]
        found.begin(frozenset(missing))()
        return len(asked)

    assert counts({0, 70}, set()) == counts({0, 70}, {1}) == 1
    assert counts(set(), set()) == counts(set(), {1}) == 0, (
        "outputs of the global batch are read by all alike"
    )
    everything = [(0, frozenset({0, 70}))]
    assert counts({0, 70}, {1}, everything) == 0, "whatever a loss reads, the gradient is there"
    assert counts({70}, {1}, everything) == 0, "logits beside a loss that is read"
    assert counts({70}, {0}, everything) == 0, "logits alone: a loss that reads nothing has no backward"


def test_outputs_of_the_whole_batch_that_are_unread_are_noted() -> None:
    noted: list[int] = []
    for sharded, missing in ((set(), {0}), ({70}, {1}), ({0}, {1}), ({0, 70}, {0, 1})):
        found = _undefined_gradients(sharded)
        found.meta = noted.append
        found.begin(frozenset(missing))
    assert noted == [1, 1 << 70]
