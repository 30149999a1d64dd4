"""Bring the captured graph into the one form that later passes read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fxdp.annotations import TensorType, note
from fxdp.mesh import DataMesh
from fxdp.pass_manager import Level

aten = torch.ops.aten

_IDENTITIES = frozenset(
    {
        aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default,
        aten.slice.Tensor, aten.slice_backward.default, aten.expand.default,
    }
)  # fmt: skip
"""Ops that, where they change neither shape nor dtype, change nothing."""


@dataclass(frozen=True)
class Canonicalize:
    """After it no identity op (`detach`, `alias`, `x[:]`) and no unused op is left.

    before: `%detach = aten.detach(%relu)` and `%mul = aten.mul.Tensor(%detach, %grad)`
    after:  `%mul = aten.mul.Tensor(%relu, %grad)`

    An identity of an input that is itself a result stays, so that no result is an input. `cat` loses the
    operands that are empty whatever the batch (an empty key-value cache), which no rule could place.
    """

    name = "canonicalize"
    requires = Level.CAPTURED
    ensures = Level.CAPTURED

    def run(self, gm: fx.GraphModule, mesh: DataMesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        results = set(gm.graph.output_node().all_input_nodes)
        for node in list(gm.graph.nodes):
            if node.target is aten.cat.default:
                _drop_empty_operands(node)
            if node.target in _IDENTITIES and _same_type(node) and node not in results:
                _hand_on_skip(node, node.args[0])
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
        _erase_unused(gm.graph)
        return gm


def _hand_on_skip(node: fx.Node, source: fx.Node) -> None:
    """A skip that an identity carried is carried by what it copied."""
    labels = [label for label in (note(source).skip, note(node).skip) if label]
    note(source).skip = ", ".join(labels) or None


def _same_type(node: fx.Node) -> bool:
    source = node.args[0]
    return isinstance(source, fx.Node) and isinstance(note(node).type, TensorType) and (
        note(source).type == note(node).type
    )


def _drop_empty_operands(cat: fx.Node) -> None:
    """`cat([nothing, x])` is `x`, also torch's legacy of a 1-d nothing beside any `x`."""
    whole = note(cat).type
    if not isinstance(whole, TensorType):
        return
    operands: list[fx.Node] = list(cat.args[0])  # type: ignore[arg-type]
    types = [note(n).type for n in operands]
    dim = int(cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0))  # type: ignore[arg-type]
    kept = [n for n, t in zip(operands, types, strict=True) if not _is_empty(t, dim % len(whole.shape))]
    if any(note(n).type.dtype == whole.dtype for n in kept):  # type: ignore[union-attr]
        cat.args = (kept, *cat.args[1:])


def _is_empty(type_: object, dim: int) -> bool:
    if not isinstance(type_, TensorType):
        return False
    return type_.shape == (0,) or (dim < len(type_.shape) and type_.shape[dim] == 0)


def _erase_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            graph.erase_node(node)
