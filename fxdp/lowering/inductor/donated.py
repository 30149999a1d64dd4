"""Saved values that a backward may overwrite, because nothing else references their memory.

    forward     %relu = relu(%h)             saved, and not an output
    backward    %gelu = %grad * (%relu > 0)  in the memory of %relu, which is freed anyway

Inductor reuses inputs that are marked as donated, as `torch.compile` does. A saved value is not donated if
the memory may be shared with an input, a result or another saved value (by a view, or because Inductor
computes concatenated values inside one buffer), or if a later computation reads the value.
"""

from __future__ import annotations

import operator
from collections import Counter

from torch import Tensor, fx

from fxdp.ir.op_kinds import is_view
from fxdp.lowering.inductor.strides import results
from fxdp.torch_compat import OpOverload, aten

_TOGETHER = frozenset(
    {aten.cat.default, aten.stack.default, aten.constant_pad_nd.default, aten.copy_.default}
)
"""Ops whose operands Inductor may compute as parts of the result, or in the memory copied into."""
_MAYBE_VIEWS = frozenset(
    {aten.reshape.default, aten._reshape_alias.default, aten.contiguous.default, aten._to_copy.default}
)


def donated(forward: fx.GraphModule, backward: fx.GraphModule, visible: int) -> frozenset[str]:
    """Return the names of the backward's inputs that the backward may overwrite.

    `visible` is the number of results of the forward before the saved values.
    """
    values = results(forward)
    made = Counter(_base(value) for value in values if isinstance(value, fx.Node))
    given = {_base(value) for value in results(backward) if isinstance(value, fx.Node)}
    saved = [value for value in values[visible:] if isinstance(value, fx.Node) and made[value] == 1]
    free = {value.name for value in saved if _is_fresh(value) and not _is_put_together(value)}
    inputs = backward.graph.find_nodes(op="placeholder")
    return frozenset(node.name for node in inputs if node.name in free and node not in given)


def donated_inputs(graph: fx.Graph, names: frozenset[str]) -> tuple[int, ...]:
    """Return the positions of these names among a graph's inputs."""
    inputs = graph.find_nodes(op="placeholder")
    return tuple(i for i, node in enumerate(inputs) if node.name in names)


def _base(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory a value may share."""
    while node.op == "call_function" and (source := _seen(node)) is not None:
        node = source
    return node


def _seen(node: fx.Node) -> fx.Node | None:
    """Return the value that a node may be a view of; None if the node is no view."""
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        return source if isinstance(source, fx.Node) and _seen(source) is not None else None
    aliases = isinstance(target, OpOverload) and any(r.alias_info is not None for r in target._schema.returns)
    if aliases or is_view(target) or target in _MAYBE_VIEWS:
        return next(iter(node.all_input_nodes), None)
    return None


def _is_fresh(node: fx.Node) -> bool:
    """Return whether an op of torch computed the value in new memory."""
    if not isinstance(node.meta.get("val"), Tensor) or _base(node) is not node:
        return False
    source = node.args[0] if node.target is operator.getitem else node
    target = source.target if isinstance(source, fx.Node) and source.op == "call_function" else None
    return isinstance(target, OpOverload) and target.namespace in ("aten", "prims")


def _is_put_together(node: fx.Node) -> bool:
    """Return whether the value, or a view of the value, becomes a part of a larger value."""
    views = [user for user in node.users if user.op == "call_function" and _seen(user) is node]
    return any(user.target in _TOGETHER for user in node.users) or any(map(_is_put_together, views))
