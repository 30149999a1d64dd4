"""What a backward may write over: values that its forward has saved for it, and that nobody else holds.

    forward     %relu = relu(%h)             saved, and given to nobody
    backward    %gelu = %grad * (%relu > 0)  in the memory of %relu, which is let go anyway

Inductor does so where it is told which inputs these are, as `torch.compile` tells it. A saved value stays as
it is if it may share its memory: with an input, a result or another saved value, by a view or because
Inductor lays out as one what is put together; and where it is read by what runs later.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence

from torch import Tensor, fx

from fxdp.ir.op_kinds import is_view
from fxdp.lowering.inductor.regions import CompiledRegion
from fxdp.lowering.inductor.strides import results
from fxdp.torch_compat import OpOverload, aten

_TOGETHER = frozenset(
    {aten.cat.default, aten.stack.default, aten.constant_pad_nd.default, aten.copy_.default}
)
"""Inductor may make their operands as parts of their result, or in the memory that they are copied into."""
_MAYBE_VIEWS = frozenset(
    {aten.reshape.default, aten._reshape_alias.default, aten.contiguous.default, aten._to_copy.default}
)


def donated(forward: fx.GraphModule, backward: fx.GraphModule, visible: int) -> frozenset[str]:
    """The names of the backward's inputs that it may write over.

    `visible` counts the results of the forward before those that it saves.
    """
    values = results(forward)
    made = Counter(_base(value) for value in values if isinstance(value, fx.Node))
    given = {_base(value) for value in results(backward) if isinstance(value, fx.Node)}
    saved = [value for value in values[visible:] if isinstance(value, fx.Node) and made[value] == 1]
    free = {value.name for value in saved if _is_fresh(value) and not _is_put_together(value)}
    inputs = backward.graph.find_nodes(op="placeholder")
    return frozenset(node.name for node in inputs if node.name in free and node not in given)


def donated_inputs(graph: fx.Graph, names: frozenset[str]) -> tuple[int, ...]:
    """The numbers of these among a graph's inputs."""
    inputs = graph.find_nodes(op="placeholder")
    return tuple(i for i, node in enumerate(inputs) if node.name in names)


def donated_to(regions: Sequence[CompiledRegion], names: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """The same of the inputs of segments, by their kinds: what each of a kind may write over."""
    last: dict[fx.Node, CompiledRegion] = {node: one for one in regions for node in one.takes}
    apart = {node for one in regions if one.between for node in one.takes}
    found: dict[str, set[int]] = {}
    for one in regions:
        own = {
            i for i, node in enumerate(one.takes)
            if node.name in names and node.op == "placeholder" and last[node] is one and node not in apart
        }  # fmt: skip
        found[one.kind] = found.get(one.kind, own) & own
    return {kind: tuple(sorted(numbers)) for kind, numbers in found.items()}


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory a value may be in."""
    while node.op == "call_function" and (source := _seen(node)) is not None:
        node = source
    return node


def _seen(node: fx.Node) -> fx.Node | None:
    """What a value is another view of, if it may be."""
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        return source if isinstance(source, fx.Node) and _seen(source) is not None else None
    aliases = isinstance(target, OpOverload) and any(r.alias_info is not None for r in target._schema.returns)
    if aliases or is_view(target) or target in _MAYBE_VIEWS:
        return next(iter(node.all_input_nodes), None)
    return None


def _is_fresh(node: fx.Node) -> bool:
    """Whether a call of torch's own has made it, in memory of its own."""
    if not isinstance(node.meta.get("val"), Tensor) or _base(node) is not node:
        return False
    source = node.args[0] if node.target is operator.getitem else node
    target = source.target if isinstance(source, fx.Node) and source.op == "call_function" else None
    return isinstance(target, OpOverload) and target.namespace in ("aten", "prims")


def _is_put_together(node: fx.Node) -> bool:
    """Whether it, or a view of it, becomes a part of something."""
    views = [user for user in node.users if user.op == "call_function" and _seen(user) is node]
    return any(user.target in _TOGETHER for user in node.users) or any(map(_is_put_together, views))
