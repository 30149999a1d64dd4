"""A lengthened program is checked against the one that it stands for, before it is used."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxdp
from fxdp.lowering.inductor.forward_backward import Pair
from fxdp.lowering.inductor.strides import copied, results
from fxdp.startup.repeated import pair_by_layer
from fxdp.startup.repeated.expanded_check import WrongLayersError, check_expanded
from fxdp.torch_compat import graph_module
from tests.captures import KNOWN, captured_once
from tests.startup.repeated.test_pair_by_layer import Stack

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")


@pytest.fixture(scope="module")
def expanded() -> tuple[fx.GraphModule, Pair]:
    """An emitted program, and its halves, made from those of a few layers."""
    found: list[Any] = []

    def noted(*given: Any) -> None:
        full, (forward, backward, order) = given  # the forward is changed afterwards
        found.append((full, (copied(forward), copied(backward), order)))
        check_expanded(*given)

    with pytest.MonkeyPatch.context() as patch, captured_once(KNOWN.setdefault(__name__, {})):
        patch.setattr(pair_by_layer, "check_expanded", noted)
        patch.setenv("FXDP_CACHE", "0")
        fxdp.compile(Stack())(torch.randn(5, 3)).backward()
    (given,) = found
    return given  # type: ignore[no-any-return]


def _with_results(gm: fx.GraphModule, change: Any) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(gm.graph, copies)
    graph.output(tuple(change([v if v is None else copies[v] for v in results(gm)])))
    return graph_module(nn.Module(), graph)


def test_a_result_is_missing(expanded: tuple[fx.GraphModule, Pair]) -> None:
    full, (forward, backward, order) = expanded
    assert backward is not None
    short = _with_results(backward, lambda found: found[:-1])
    with pytest.raises(WrongLayersError, match=r"the backward gives \d+ values; expected"):
        check_expanded(full, (forward, short, order))


def test_what_is_saved_is_shifted(expanded: tuple[fx.GraphModule, Pair]) -> None:
    """The backward would read the value of another op."""
    full, (forward, backward, order) = expanded
    shifted = (*order[1:], order[0])
    with pytest.raises(WrongLayersError, match="for saved value"):
        check_expanded(full, (forward, backward, shifted))
    with pytest.raises(WrongLayersError, match="for saved value"):
        check_expanded(full, (forward, backward, (10**6, *order[1:])))


def test_gradients_of_other_parameters(expanded: tuple[fx.GraphModule, Pair]) -> None:
    full, (forward, backward, order) = expanded
    assert backward is not None
    turned = _with_results(backward, lambda found: [*found[::-1]])
    with pytest.raises(WrongLayersError, match="is the gradient of"):
        check_expanded(full, (forward, turned, order))


def test_an_input_is_missing(expanded: tuple[fx.GraphModule, Pair]) -> None:
    full, (forward, backward, order) = expanded
    with pytest.raises(WrongLayersError, match=r"the backward takes \d+ values; expected"):
        check_expanded(full, (forward, backward, order[:-1]))


def test_a_call_reads_what_comes_later(expanded: tuple[fx.GraphModule, Pair]) -> None:
    full, (forward, backward, order) = expanded
    graph = fx.Graph()
    graph.output(graph.graph_copy(forward.graph, {}))
    calls = [n for n in graph.nodes if n.op == "call_function"]
    calls[-1].append(calls[0])
    wrong = graph_module(forward, graph)
    with pytest.raises(WrongLayersError, match="forward: "):
        check_expanded(full, (wrong, backward, order))


@pytest.mark.parametrize("name", ["check_expanded", "expanded", "_reduced_program"])
def test_what_fails_is_cut_layer_by_layer(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault in what only saves time costs that time, and says so in one debug line."""

    def broken(*_: Any) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(pair_by_layer, name, broken)
    monkeypatch.setenv("FXDP_CACHE", "0")
    model, x = Stack(), torch.randn(5, 3)
    expected = copy.deepcopy(model)
    with caplog.at_level(logging.DEBUG, "fxdp"):
        loss = fxdp.compile(model)(x)
    torch.testing.assert_close(loss, expected(x))
    (said,) = [r for r in caplog.records if "repeated layers are left out" in r.message]
    assert said.levelno == logging.DEBUG
