"""Recurrent layers in a form that capture can see through.

    lstm(x, ..., num_layers=2, dropout=0.5)
                                               ->      y  = lstm(x, ..., num_layers=1, dropout=0)
                                                       y1 = dropout(y, 0.5)
                                                       y2 = lstm(y1, ..., num_layers=1, dropout=0)

torch's own decomposition of several layers (2.13) leaves out the dropout between them. The one of torch 2.11
gives an LSTM's states the shape (layers, 1, batch, features).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fxdp.ir.graphs import given_arguments
from fxdp.torch_compat import stacks_lstm_states

aten = torch.ops.aten

_LAYERS = frozenset(
    {
        aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input,
        aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data,
    }
)  # fmt: skip
_LSTMS = (aten.lstm.input, aten.lstm.data)


@contextlib.contextmanager
def unfused_recurrence() -> Iterator[None]:
    """Trace LSTMs and GRUs as steps of known ops, not as one library call whose workspace is opaque."""
    with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
        yield


def part_layers(gm: fx.GraphModule) -> None:
    """Call recurrent layers that have dropout between them one by one; in place."""
    for node in list(gm.graph.nodes):
        if node.target in _LAYERS:
            given = given_arguments(node)
            if given["train"] and given["dropout"] > 0 and given["num_layers"] > 1:
                _part(gm.graph, node, given)
    if stacks_lstm_states():
        for node in [n for n in gm.graph.nodes if n.target in _LSTMS]:
            _merge_state_dims(node)
    gm.recompile()


def _merge_state_dims(lstm: fx.Node) -> None:
    """Make states of (layers, 1, batch, features) those of (layers, batch, features); others stay."""
    for pick in [user for user in lstm.users if user.target is operator.getitem and user.args[1] != 0]:
        readers = list(pick.users)
        with lstm.graph.inserting_after(pick):
            merged = lstm.graph.call_function(aten.flatten.using_ints, (pick, 0, -3))
        merged.meta = dict(pick.meta)
        for reader in readers:
            reader.replace_input_with(pick, merged)


def _part(graph: fx.Graph, node: fx.Node, given: dict[str, Any]) -> None:
    sequence, target = next(iter(given)), node.target
    count = len(target._schema.returns)  # type: ignore[union-attr]
    batch_first = given.get("batch_first", False)
    alone = {**given, "num_layers": 1, "dropout": 0.0} | ({"batch_first": False} if batch_first else {})
    meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}

    def call(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta = dict(meta)
        return made

    with graph.inserting_before(node):
        x = call(aten.transpose.int, given[sequence], 0, 1) if batch_first else given[sequence]
        last: list[list[fx.Node]] = []
        for layer in range(given["num_layers"]):
            x = call(aten.dropout.default, x, given["dropout"], True) if layer else x
            own = {sequence: x, "hx": _states(call, given, layer), "params": _parameters(given, layer)}
            made = call(target, *{**alone, **own}.values())
            x, *states = (call(operator.getitem, made, i) for i in range(count))
            last.append(states)
        x = call(aten.transpose.int, x, 0, 1) if batch_first else x
        results = [x, *(call(aten.cat.default, list(states), 0) for states in zip(*last, strict=True))]
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


def _parameters(given: dict[str, Any], layer: int) -> Any:
    size = len(given["params"]) // given["num_layers"]
    return given["params"][layer * size : (layer + 1) * size]


def _states(call: Any, given: dict[str, Any], layer: int) -> Any:
    """The initial states of a layer: both directions' rows."""
    directions = 2 if given["bidirectional"] else 1
    rows = layer * directions, (layer + 1) * directions
    if isinstance(given["hx"], (list, tuple)):
        return [call(aten.slice.Tensor, state, 0, *rows) for state in given["hx"]]
    return call(aten.slice.Tensor, given["hx"], 0, *rows)
