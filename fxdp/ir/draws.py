"""Which calls draw random numbers: seeded ops, unless their arguments turn the drawing off."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxdp.ir.graphs import argument_of
from fxdp.torch_compat import OpOverload


def draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call takes numbers from a generator (attention without dropout does not)."""
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    probability = argument_of(target, "dropout_p", args, kwargs)
    return probability is None or probability != 0.0


def node_draws(node: fx.Node) -> bool:
    """The same for a node; a result picked from a drawing call counts as drawn."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and node_draws(source)
    return node.op == "call_function" and draws(node.target, node.args, node.kwargs)
