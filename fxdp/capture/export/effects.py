"""Undo the tokens that torch threads through ops with effects (checks, prints) to keep their order."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fxdp import torch_compat


def strip_effects(graph: fx.Graph) -> None:
    """Turn `with_effects(token, op, x)` into `op(x)`, and drop the tokens.

    Before:  %w = with_effects(%token, op, %x);  %new = getitem(%w, 0);  %y = getitem(%w, 1)
    After:   %y = op(%x)
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
    """Let a `getitem` of the wrapped op read the plain one."""
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
