"""Rewrites of graphs that torch's tracing leaves in a form which the next step cannot process.

with_effects(token, op, x)          op(x)                       ops that torch orders by tokens
cat(unbind(x))                      flatten(x, 0, 1)            lists with a member for each sample
lstm(num_layers=2, dropout=0.5)     lstm, dropout, lstm         layers that torch decomposes wrongly
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxdp import torch_compat
from fxdp.capture.export.loop_iterations import SPLITS, dim_at, split_dim
from fxdp.capture.export.unread_numbers import drop_lengths
from fxdp.ir.graph.graphs import given_arguments
from fxdp.torch_compat import aten

_TOGETHER = frozenset({aten.cat.default, aten.stack.default})
_MERGES = frozenset({aten.reshape.default, aten.view.default, aten.flatten.using_ints})
_PICKED = frozenset({*SPLITS, *_MERGES, operator.getitem})

_LAYERS = frozenset(
    {
        aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input,
        aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data,
    }
)  # fmt: skip


def strip_effects(graph: fx.Graph) -> None:
    """Replace `with_effects(token, op, x)` by `op(x)`, and drop the tokens.

    Before:  %w = with_effects(%token, op, %x);  %new = getitem(%w, 0);  %y = getitem(%w, 1) After:   %y =
    op(%x)
    """
    for node in graph.find_nodes(op="call_function", target=torch_compat.with_effects):
        _token, op, *args = node.args
        with graph.inserting_before(node):
            plain = graph.call_function(op, tuple(args), dict(node.kwargs))
        plain.meta = dict(node.meta)
        values: Any = node.meta.get("val") or (None,)
        plain.meta["val"] = values[1] if len(values) == 2 else tuple(values[1:])
        for user in list(node.users):
            _redirect(user, plain, single=len(values) == 2)
        graph.erase_node(node)


def _redirect(user: fx.Node, plain: fx.Node, *, single: bool) -> None:
    """Redirect a `getitem` of the wrapped op to the plain op."""
    assert user.target is operator.getitem
    index: Any = user.args[1]
    if index == 0:
        user.replace_all_uses_with(None)  # type: ignore[arg-type]
        user.graph.erase_node(user)
    elif single:
        user.replace_all_uses_with(plain)
        user.graph.erase_node(user)
    else:
        user.args = (plain, index - 1)


def rejoin(gm: fx.GraphModule) -> None:
    """Replace each `cat` or `stack` of all parts of a tensor, in order, by an op on the tensor; in place.

        unbind: x[0], x[1], ..., x[b - 1]
        cat(x[0], x[1], ...)                      ->      flatten(x, 0, 1)

    A list over the batch has one member per sample, so static traces of several batch sizes would not fit
    together. If all members are only joined again by a `cat` or `stack`, the list is not needed. Neither are
    then the numbers that gave the length of each member (`x.split(lengths.tolist())`).
    """
    apart: dict[fx.Node, None] = {}
    for node in list(gm.graph.nodes):
        found = _taken_apart(node) if node.target in _TOGETHER else None
        if found is None:
            continue
        with gm.graph.inserting_before(node):
            full = _merged(gm.graph, found, node) if found.merged else _joined(gm.graph, found.apart, node)
        if full is not None:
            full.meta = dict(node.meta)
            node.replace_all_uses_with(full)
            gm.graph.erase_node(node)
            apart[found.apart] = None
    unread: list[Any] = []
    for node in list(reversed(gm.graph.nodes)):
        if not node.users and node.target in _PICKED:
            if node in apart and node.target is aten.split_with_sizes.default:
                unread.append((node.args[0], dim_at(node, 2), node.args[1]))
            gm.graph.erase_node(node)
    for x, dim, lengths in unread:
        drop_lengths(x, dim, lengths)
    gm.recompile()


@dataclass(frozen=True)
class _Apart:
    """All results of a split op, in order, as joined by a `cat` or `stack`."""

    apart: fx.Node
    merged: bool
    """True if leading dims of each result are merged before the join."""


def _taken_apart(join: fx.Node) -> _Apart | None:
    parts: Any = join.args[0]
    merged = all(isinstance(part, fx.Node) and part.target in _MERGES for part in parts)
    picked = [part.args[0] for part in parts] if merged else parts
    if not picked or not all(isinstance(p, fx.Node) and p.target is operator.getitem for p in picked):
        return None
    source = picked[0].args[0]
    if any(part.args[0] is not source for part in picked) or source.target not in SPLITS:
        return None
    complete = [part.args[1] for part in picked] == list(range(len(source.meta["val"])))
    return _Apart(source, merged) if complete else None


def _merged(graph: fx.Graph, found: _Apart, join: fx.Node) -> fx.Node | None:
    """Replace `cat([part.reshape(-1, *rest) for part in apart(x)])` by `x.reshape(-1, *rest)`."""
    x: Any = found.apart.args[0]
    parts: Any = join.args[0]
    rest = _row(join, join.meta["val"].dim() - 1)
    rows = rest and all(_row(part, len(rest)) == rest == _row(part.args[0], len(rest)) for part in parts)
    along = join.target is aten.cat.default and _merged_dim(join) == 0
    if not (rows and along and split_dim(found.apart) == 0):
        return None
    return graph.call_function(aten.reshape.default, (x, [-1, *rest]))


def _row(node: fx.Node, dims: int) -> list[int]:
    """Return the last sizes of a value; empty if a size is a symbol, or there are fewer dims."""
    sizes = list(node.meta["val"].shape[-dims:]) if dims else []
    return sizes if len(sizes) == dims and all(isinstance(size, int) for size in sizes) else []


def _joined(graph: fx.Graph, apart: fx.Node, join: fx.Node) -> fx.Node | None:
    """Replace `join(apart(x))` by one op on `x`."""
    x: Any = apart.args[0]
    unbound, stacked = apart.target is aten.unbind.int, join.target is aten.stack.default
    dim = _merged_dim(join)
    if split_dim(apart) != dim or (stacked and not unbound):
        return None
    if unbound and not stacked:
        return graph.call_function(aten.flatten.using_ints, (x, dim, dim + 1))
    return graph.call_function(aten.clone.default, (x,))


def _merged_dim(join: fx.Node) -> int:
    return int(dim_at(join, 1) % join.meta["val"].dim())


@contextlib.contextmanager
def unfused_recurrence() -> Iterator[None]:
    """Trace LSTMs and GRUs as steps of known ops, instead of a library call with an opaque workspace."""
    with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
        yield


def part_layers(gm: fx.GraphModule) -> None:
    """Split calls of recurrent layers with dropout between layers into one call per layer, in place.

        lstm(x, ..., num_layers=2, dropout=0.5)   ->      y  = lstm(x, ..., num_layers=1, dropout=0)
                                                          y1 = dropout(y, 0.5)
                                                          y2 = lstm(y1, ..., num_layers=1, dropout=0)

    Torch's own decomposition of several layers (2.13) omits the dropout between them.
    """
    for node in list(gm.graph.nodes):
        if node.target in _LAYERS:
            given = given_arguments(node)
            if given["train"] and given["dropout"] > 0 and given["num_layers"] > 1:
                _part(gm.graph, node, given)
    gm.recompile()


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
    """Return the initial states of a layer: the rows of both directions."""
    directions = 2 if given["bidirectional"] else 1
    rows = layer * directions, (layer + 1) * directions
    if isinstance(given["hx"], (list, tuple)):
        return [call(aten.slice.Tensor, state, 0, *rows) for state in given["hx"]]
    return call(aten.slice.Tensor, given["hx"], 0, *rows)
