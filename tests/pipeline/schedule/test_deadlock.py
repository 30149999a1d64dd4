"""No order of transfers that fxdp makes can block, and the check sees those that can."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest

from fxdp.errors import DeadlockError, ScheduleError
from fxdp.pipeline.schedule.action import Action, Kind
from fxdp.pipeline.schedule.catalogue import _SCHEDULES, make
from fxdp.pipeline.schedule.deadlock import check
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.schedule.timeline import Costs
from fxdp.pipeline.schedule.transfers import Edge, End, Event, Transfer, _Programs, programs


def random_edges(stages: int, seed: object) -> list[Edge]:
    """The chain both ways, skips both ways, a value and a gradient of the step."""
    rng = random.Random(str(seed))
    edges = [Edge(f"x{s}", s, s + 1) for s in range(stages - 1)]
    edges += [Edge(f"grad_x{s}", s + 1, s, backward=True) for s in range(stages - 1)]
    for k in range(rng.randint(0, 2 * stages)):
        first, last = sorted(rng.sample(range(stages), 2))
        edges.append(Edge(f"skip{k}", first, last))
        if rng.random() < 0.7:
            edges.append(Edge(f"grad_skip{k}", last, first, backward=True))
    first, last = sorted(rng.sample(range(stages), 2))
    edges += [Edge("table", first, last, once=True), Edge("tied", last, first, backward=True, once=True)]
    return rng.sample(edges, len(edges))


def cases(name: str, microbatches: Iterable[int]) -> Iterator[tuple[Schedule, list[Edge]]]:
    for stages in range(2, 9):
        for ranks in range(1, stages + 1):
            for m in microbatches:
                edges = random_edges(stages, (name, stages, ranks, m))
                yield make(name, stages, ranks, m), edges


@pytest.mark.parametrize("name", _SCHEDULES)
def test_every_schedule_with_any_skips_is_proven(name: str) -> None:
    """Stages 2 to 8, any number of ranks; micro-batches up to one more than stages, and twice as many."""
    for schedule, edges in cases(name, (*range(1, 10), 16)):
        check(programs(schedule, edges))


def naive(schedule: Schedule, edges: list[Edge]) -> _Programs:
    """Receive right before use, send right after: what one writes first."""
    home = schedule.placement
    rows: list[tuple[Event, ...]] = []
    for rank, actions in enumerate(schedule.ranks):
        row: list[Event] = []
        for action in actions:
            ours = [
                e
                for e in edges
                if e.backward == action.gives_gradient and action.kind is not Kind.WEIGHT_GRADIENT
            ]
            ours = [e for e in ours if home[e.source] != home[e.target] and not e.once]
            row += [
                Transfer(End.RECV, home[e.source], e, action.microbatch)
                for e in ours
                if e.target == action.stage
            ]
            row.append(action)
            row += [
                Transfer(End.SEND, home[e.target], e, action.microbatch)
                for e in ours
                if e.source == action.stage
            ]
        assert all(home[event.stage] == rank for event in row if isinstance(event, Action))
        rows.append(tuple(row))
    return tuple(rows)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero-bubble"])
def test_receiving_right_before_use_blocks_and_is_cured(name: str) -> None:
    blocked = total = 0
    for schedule, edges in cases(name, range(1, 9, 3)):
        ranks = naive(schedule, edges)
        total += 1
        if not ends(ranks):
            with pytest.raises(DeadlockError, match="these ranks wait for one another"):
                check(ranks)
            blocked += 1
        cured = programs(schedule, [edge for edge in edges if not edge.once])
        check(cured)
        assert [sorted(map(str, row)) for row in cured] == [sorted(map(str, row)) for row in ranks]
    assert blocked > total / 3


def test_the_circle_is_shown() -> None:
    """Plain 1F1B with the naive placement: rank 0 sends the next activation, rank 1 a gradient."""
    edges = [Edge("x", 0, 1), Edge("grad_x", 1, 0, backward=True)]
    with pytest.raises(DeadlockError) as error:
        check(naive(make("1f1b", 2, 2, 3), edges))
    lines = str(error.value).splitlines()
    assert set(lines[1:-1]) == {
        "  rank 0, after 0F1 and before 0B0: waits in `send x mb1 to 1`",
        "  rank 1, after 1B0 and before 1F1: waits in `send grad_x mb0 to 0`",
    }
    assert lines[-1].startswith("expected each send to meet its receive")


def test_a_circle_of_three_through_a_skip() -> None:
    skip, x, y = Edge("skip", 0, 2), Edge("x", 0, 1), Edge("y", 1, 2)
    f = [Action(stage, Kind.FORWARD, 0) for stage in range(3)]
    ranks: _Programs = (
        (f[0], Transfer(End.SEND, 2, skip, 0), Transfer(End.SEND, 1, x, 0)),
        (Transfer(End.RECV, 0, x, 0), f[1], Transfer(End.SEND, 2, y, 0)),
        (Transfer(End.RECV, 1, y, 0), Transfer(End.RECV, 0, skip, 0), f[2]),
    )
    with pytest.raises(DeadlockError) as error:
        check(ranks)
    assert sorted(str(error.value).splitlines()[1:4]) == [
        "  rank 0, after 0F0: waits in `send skip mb0 to 2`",
        "  rank 1, before 1F0: waits in `recv x mb0 from 0`",
        "  rank 2, before 2F0: waits in `recv y mb0 from 1`",
    ]
    check(programs(Schedule("three", 3, 1, (0, 1, 2), tuple((action,) for action in f)), (skip, x, y)))


def test_every_swap_of_two_neighbouring_transfers_is_judged() -> None:
    """A swap on one rank only: the check refuses exactly the swaps after which a replay gets stuck."""
    right = programs(make("1f1b", 4, 4, 3), random_edges(4, "swaps"))
    refused = 0
    for rank, row in enumerate(right):
        for i in range(len(row) - 1):
            swapped = (*row[:i], row[i + 1], row[i], *row[i + 2 :])
            ranks = (*right[:rank], swapped, *right[rank + 1 :])
            if not all(isinstance(event, Transfer) for event in row[i : i + 2]):
                continue
            try:
                check(ranks)
            except DeadlockError:
                refused += 1
                assert not ends(ranks)
            else:
                assert ends(ranks)
    assert refused > 5


def ends(ranks: _Programs) -> bool:
    """Whether blocking rendezvous comes to an end: a second opinion, by repeated search."""
    left = [[event for event in row if isinstance(event, Transfer)] for row in ranks]
    while any(left):
        pairs = [
            (a, b)
            for a, row in enumerate(left)
            for b, other in enumerate(left)
            if row and other and row[0].end is End.SEND and row[0].peer == b
            if other[0] == Transfer(End.RECV, a, row[0].edge, row[0].microbatch)
        ]
        if not pairs:
            return False
        for a, b in pairs:
            del left[a][0], left[b][0]
    return True


def random_order(rng: random.Random, stages: int, microbatches: int) -> list[Action]:
    """Any order that the data allow."""
    left = {m: [Action(s, Kind.FORWARD, m) for s in range(stages)] for m in range(microbatches)}
    for m, actions in left.items():
        actions += [Action(s, Kind.BACKWARD, m) for s in reversed(range(stages))]
    order = []
    while left:
        m = rng.choice(list(left))
        order.append(left[m].pop(0))
        if not left[m]:
            del left[m]
    return order


def test_orders_of_the_user_are_proven_or_refused() -> None:
    """Any placement; a good order is always proven, a disturbed one proven or refused, never stuck."""
    refused = proven = 0
    for seed in range(150):
        rng = random.Random(seed)
        stages, microbatches, count = rng.randint(2, 6), rng.randint(1, 4), rng.randint(2, 4)
        placement = tuple(rng.randrange(count) for _ in range(stages))
        order = random_order(rng, stages, microbatches)
        rows = [tuple(a for a in order if placement[a.stage] == rank) for rank in range(count)]
        edges = random_edges(stages, seed)
        check(programs(Schedule("good", stages, microbatches, placement, tuple(rows)), edges))
        disturbed = tuple(tuple(swap(rng, row)) for row in rows)
        try:
            ranks = programs(Schedule("disturbed", stages, microbatches, placement, disturbed), edges)
        except ScheduleError:
            refused += 1
        else:
            check(ranks)
            assert ends(ranks)
            proven += 1
    assert refused > 30
    assert proven > 30


def swap(rng: random.Random, row: tuple[Action, ...]) -> list[Action]:
    """Two neighbours change places."""
    moved = list(row)
    if len(moved) > 1:
        i = rng.randrange(len(moved) - 1)
        moved[i : i + 2] = moved[i + 1], moved[i]
    return moved


def test_transfers_without_other_end_or_out_of_place() -> None:
    x = Edge("x", 0, 1)
    send, recv = Transfer(End.SEND, 1, x, 0), Transfer(End.RECV, 0, x, 0)
    first, second = Action(0, Kind.FORWARD, 0), Action(1, Kind.FORWARD, 0)
    bad: list[tuple[_Programs, str]] = [
        (((first, send), (second,)), "rank 0 has `send x mb0 to 1`, but rank 1 has no other end of it"),
        (((first, send, send), (recv, second)), "rank 0 has `send x mb0 to 1` 2 times"),
        (
            ((first, Transfer(End.SEND, 0, x, 0)), (second,)),
            "rank 0 has `send x mb0 to 0`, but 0 is no other rank",
        ),
        (((send, first), (recv, second)), "rank 0 has `send x mb0 to 1` before 0F0, which makes it"),
        (((first, send), (second, recv)), "rank 1 has `recv x mb0 from 0` after 1F0, which uses it"),
    ]
    for ranks, message in bad:
        with pytest.raises(DeadlockError) as error:
            check(ranks)
        assert f"  {message}" in str(error.value).splitlines()
    check(((first, send), (recv, second)))


def test_no_transfers_cure_a_circle_of_actions() -> None:
    words = ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]
    ranks = tuple(tuple(Action.parse(word) for word in row.split()) for row in words)
    with pytest.raises(DeadlockError, match="rank 0 is at 0B0, which needs 1B0 of rank 1"):
        programs(Schedule("circle", 2, 2, (0, 1), ranks), ())


def test_each_edge_travels_once_and_at_its_moment() -> None:
    edges = [
        Edge("x", 0, 1),
        Edge("table", 0, 2, once=True),
        Edge("within", 0, 3),
        Edge("grad", 2, 1, backward=True),
        Edge("tied", 1, 0, backward=True, once=True),
    ]
    ranks = programs(make("zero-bubble", 6, 3, 2), edges, Costs.uniform(6))
    rows = [" ".join(str(event).replace(" ", "_") for event in row) for row in ranks]
    assert rows[0].startswith("0F0 send_x_mb0_to_1 send_table_to_2 0F1 send_x_mb1_to_1")
    assert sum(row.count("table") for row in rows) == 2
    assert "within" not in " ".join(rows)
    assert "2I0 send_grad_mb0_to_1" in rows[2]
    assert "1W1 send_tied_to_0" in rows[1]
    evaluation = programs(make("1f1b", 6, 3, 2).forward_only(), edges)
    assert not any(isinstance(e, Transfer) and e.edge.backward for row in evaluation for e in row)


@pytest.mark.parametrize(
    ("edges", "fault"),
    [
        ([Edge("a", 1, 0)], "rank 0 has `recv a mb0 from 1` after 0F0, which uses it"),
        ([Edge("b", 0, 1, backward=True)], "rank 1 has `recv b mb0 from 0` after 1B0, which uses it"),
        ([Edge("d", 0, 1)] * 2, "rank 0 has `send d mb0 to 1` 2 times"),
    ],
)
def test_edges_that_go_the_wrong_way(edges: list[Edge], fault: str) -> None:
    with pytest.raises(DeadlockError, match=fault):
        check(programs(make("1f1b", 2, 2, 2), edges))
