"""Which calls of a kind are compiled: programs are few, and none is made for sizes that seldom come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat

import torch

from fxdp.run.calls.kind_of_calls import KindOfCalls

FIRST = 5


def _programs(sizes: Iterable[int], *, fixes_sizes: bool = False) -> list[tuple[int, int, bool]]:
    """Return the call, the size and whether it is for any size, of each program that a loop compiles."""
    kind, made = KindOfCalls(), list[tuple[int, int, bool]]()
    taken = set[int]()
    takes_any = False
    for number, size in enumerate(sizes, 1):
        shapes = (torch.Size((size, 3)),)
        kind.add(shapes)
        if kind.waits(shapes, FIRST) or not kind.is_turn(shapes):
            continue
        anew = size not in taken and not takes_any
        for_any = anew and not fixes_sizes and (kind.is_varied or bool(made))
        if anew:
            made.append((number, size, for_any))
        taken.add(size)
        takes_any = takes_any or for_any
        kind.compiled(shapes, anew=anew, for_any=takes_any)
    return made


def _epochs(batches: Sequence[int], times: int) -> Iterable[int]:
    return chain.from_iterable(repeat(batches, times))


def test_the_first_program_is_of_the_most_frequent_size_and_the_second_waits_its_turn() -> None:
    # epochs of five batches: the fifth call is an epoch's last batch
    assert _programs(_epochs([8, 8, 8, 8, 3], 4)) == [(6, 8, False)]
    assert _programs(_epochs([8, 8, 8, 8, 3], 9)) == [(6, 8, False), (30, 3, True)]


def test_calls_of_ever_new_sizes_have_one_program_for_any() -> None:
    assert _programs(range(1, 100)) == [(5, 5, True)]


def test_code_that_fixes_its_sizes_is_compiled_ever_more_seldom() -> None:
    found = [number for number, _, _ in _programs(range(1, 200), fixes_sizes=True)]
    assert found == [5, 10, 20, 40, 80, 160]


def test_calls_that_take_less_than_a_program_costs_wait_for_twice_as_many() -> None:
    kind, shapes, asked = KindOfCalls(), (torch.Size((8, 3)),), list[int]()
    for number in range(1, 40):
        kind.add(shapes)
        kind.seconds += 1
        if kind.waits(shapes, FIRST):
            continue
        asked.append(number)
        if kind.seconds < 4 * FIRST:
            kind.postpone()
        else:
            kind.compiled(shapes, anew=True, for_any=False)
            break
    assert asked == [FIRST, 2 * FIRST, 4 * FIRST]
    assert kind.seconds == 0  # the next program has calls of its own to pay for it
    kind.add(shapes := (torch.Size((3, 3)),))
    assert kind.waits(shapes, FIRST) == FIRST - 1


def test_calls_vary_in_the_batch_alone_or_in_other_dims() -> None:
    kind, other = KindOfCalls(), KindOfCalls()
    for size in range(1, 6):
        kind.add((torch.Size((size, 3)),))
        other.add((torch.Size((4, size)),))
    assert kind.is_varied
    assert not kind.has_varied_dims([0])
    assert other.has_varied_dims([0])
    assert not other.has_varied_dims([1])
