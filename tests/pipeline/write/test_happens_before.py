"""Every emitted program is ordered; one that lacks a wait, or has an event too early, is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from fxdp.errors import VerifierError
from fxdp.pipeline.write.happens_before import check_order
from fxdp.runtime import p2p
from tests.pipeline.cases import CASES, Case, graphs, random_cases
from tests.pipeline.fake_steps import races_of

WAITS = ("wait_event", p2p.wait, p2p.wait_sent)


def _copy(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def _mutants(graph: fx.Graph) -> Iterator[str]:
    """The same graph without one wait, or with one event recorded before the call that it comes after."""
    for node in list(graph.nodes):
        place, name, args = node.next, node.name, node.args
        if node.target is p2p.wait:  # what is received is then taken as it is
            with graph.inserting_before(node):
                taken = graph.call_function(getattr, (args[0], "value"))
            node.replace_all_uses_with(taken)
            graph.erase_node(node)
            yield f"without {node}"
            taken.target, taken.args, taken.name = node.target, args, name
        elif node.target in WAITS:
            graph.erase_node(node)
            yield f"without {node}"
            with graph.inserting_before(place):
                graph.create_node(node.op, node.target, args).name = name
        elif node.target == "record_event" and node.prev.op != "placeholder":
            (last,) = (n for n in graph.nodes if name == f"after_{n.name}")
            last.prepend(node)
            yield f"with {node} too early"
            place.prepend(node)


def _fault(graph: fx.Graph) -> str:
    try:
        check_order(graph)
    except VerifierError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", [*CASES, *random_cases(16)], ids=str)
def test_programs_are_ordered_and_each_wait_is_needed(case: Case) -> None:
    """A fake device sees no race, and the check refuses the program without any one of its waits."""
    for graph in graphs(*case):  # each was checked when it was written
        assert races_of(graph) == []
        for what in _mutants(graph):
            assert _fault(graph), f"{what} is not noticed:\n{graph}"
        assert not _fault(graph)  # as it was


def test_without_waits_the_fake_device_sees_races() -> None:
    """Not for each of them: where memory is not given out again, letting go of it early does no harm."""
    raced = [
        bool(races_of(graph))
        for graph in graphs(2, 2, {"pipeline": {"microbatches": 4}})
        for _ in _mutants(graph)
    ]
    assert len(raced) > 100
    assert sum(raced) > len(raced) / 2


@pytest.mark.parametrize("case", CASES[2:5], ids=str)
def test_what_the_check_accepts_has_no_race(case: Case) -> None:
    """Programs whose waits stand elsewhere, some of them well ordered and some not."""
    rng, accepted = random.Random(1), 0
    for graph in graphs(*case):
        for _ in range(30):
            moved = _copy(graph)
            waits = [n for n in moved.nodes if n.target is p2p.wait_sent or n.target == "wait_event"]
            node = rng.choice(waits)
            order = list(moved.nodes)
            later = [n for n in order[order.index(node) + 1 :][:12] if n.op != "output"]
            rng.choice(later or [node]).append(node)
            if not _fault(moved):
                assert races_of(moved) == [], moved
                accepted += 1
    assert accepted > 5


def test_evaluation_is_ordered() -> None:
    for graph in graphs(3, 2, {"pipeline": {"microbatches": 4}}, trains=False):
        assert races_of(graph) == []
        assert all(_fault(graph) for _ in _mutants(graph))


# ---- what it says ----


def _program(
    *, made: bool = True, sent: bool = True, received: bool = True, process_mesh: bool = True
) -> fx.Graph:
    """A value sent, one received, one reduced; each with its wait or without."""
    g = fx.Graph()
    batch = g.placeholder("batch")
    value = g.create_node("call_module", "forward_0", (batch,), name="value")
    event = g.create_node("call_module", "record_event", ("compute",), name="event")
    for stream in ("p2p_forward", "reduce"):
        if made or stream == "reduce":
            g.create_node("call_module", "wait_event", (stream, event))
    on = {"stream": "p2p_forward"}
    send = g.create_node("call_module", "send_forward", (value, 1, 0), on, "send")
    receive = g.create_node("call_module", "receive_forward", ([2], torch.float32, 1, 1), on, "receive")
    total = g.create_node("call_module", "finish_0", (batch,), {"stream": "reduce"}, "total")
    event = g.create_node("call_module", "record_event", ("reduce",), name="reduced")
    if process_mesh:
        g.create_node("call_module", "wait_event", ("compute", event, batch))
    if sent:
        g.call_function(p2p.wait_sent, (send,))
    got = g.call_function(p2p.wait if received else getattr, (receive, "value")[: 2 - received])
    g.output((g.create_node("call_module", "add", (got, total), name="sum"),))
    return g


def test_a_program_with_all_its_waits_passes() -> None:
    check_order(_program())


def test_words_for_a_value_that_is_not_made() -> None:
    assert_expected_inline(
        _fault(_program(made=False)),
        """\
streams of a program that are not ordered:
  %send on p2p_forward reads %value, but nothing orders it after the value is made
  %receive runs on p2p_forward, which has not waited for %value on compute
expected an event of the one stream for which the other waits, or a wait for the transfer
this is a bug in fxdp""",
    )


def test_words_for_a_value_that_is_let_go_of() -> None:
    assert_expected_inline(
        _fault(_program(sent=False)),
        """\
streams of a program that are not ordered:
  %value is let go of after %send, but compute has not waited for %send
  %send is let go of after %send, but compute has not waited for %send
  the step ends, but compute has not waited for %send
expected an event of the one stream for which the other waits, or a wait for the transfer
this is a bug in fxdp""",
    )


def test_words_for_a_value_that_has_not_arrived() -> None:
    assert_expected_inline(
        _fault(_program(received=False)),
        """\
streams of a program that are not ordered:
  %receive is let go of after %getattr_1, but compute has not waited for %receive
  %sum_1 on compute reads %getattr_1, but nothing orders it after the value is made
  the step ends, but compute has not waited for %receive
expected an event of the one stream for which the other waits, or a wait for the transfer
this is a bug in fxdp""",
    )


def test_words_for_a_sum_that_is_not_waited_for() -> None:
    assert_expected_inline(
        _fault(_program(process_mesh=False)),
        """\
streams of a program that are not ordered:
  %batch is let go of after %total, but compute has not waited for %total
  %sum_1 on compute reads %total, but nothing orders it after the value is made
  the step ends, but compute has not waited for %total
expected an event of the one stream for which the other waits, or a wait for the transfer
this is a bug in fxdp""",
    )
