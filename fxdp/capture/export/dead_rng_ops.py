"""Merge consecutive random ops with unread results, as in a loop that draws a number for each sample.

    for one in x:                                   %e = empty([1]);  uniform_(%e);  item(%e)       per sample
        sizes[int(torch.rand(1) * 1)]               uniform_(empty([3, 1]))                         once

The ops cannot be erased, since they advance the generator for later random ops. On CPU one op of the total
size advances the generator equally; on GPU the generator advances per kernel launch, so these ops are left
alone.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import fx

from fxdp.torch_compat import aten

_READS = frozenset({aten.item.default, aten._local_scalar_dense.default})


def join_unread_draws(graph: fx.Graph) -> None:
    """Merge runs of equal random ops with unread results into one op each, in place."""
    draws = [
        node for node in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    ]
    for kind, found in groupby(draws, _kind):
        alike = list(found)
        if kind is not None and len(alike) > 1:
            _join(graph, alike)


def _kind(draw: fx.Node) -> Any:
    """Return a key that is equal for random ops that can be merged; None if the result may be read."""
    into: Any = draw.args[0] if draw.args else None
    unread = all(user.target in _READS and not user.users for user in draw.users)
    if draw.target is not aten.uniform_.default or not unread or list(into.users) != [draw]:
        return None
    if into.target is not aten.empty.memory_format or into.meta["val"].device.type != "cpu":
        return None
    return str((into.args, into.kwargs, draw.args[1:], draw.kwargs))


def _join(graph: fx.Graph, draws: list[fx.Node]) -> None:
    last: Any = draws[-1]
    into: Any = last.args[0]
    with graph.inserting_before(last):
        sizes = [len(draws), *into.args[0]]
        made = graph.call_function(into.target, (sizes, *into.args[1:]), into.kwargs)
        drawn = graph.call_function(last.target, (made, *last.args[1:]), last.kwargs)
    for new, old in ((made, into), (drawn, last)):
        new.meta = {key: value for key, value in old.meta.items() if key != "val"}
    for draw in draws:
        for node in (*draw.users, draw, draw.args[0]):
            graph.erase_node(node)  # type: ignore[arg-type]
