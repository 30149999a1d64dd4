"""Compute denominators of losses from the targets alone; torch computes both together."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import copy_meta, tensor_type
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.value_types import NodeType, TensorType
from fxdp.torch_compat import aten

_LOSSES = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})
_BACKWARDS = frozenset({aten.nll_loss_backward.default, aten.nll_loss2d_backward.default})


def _count(graph: fx.Graph, loss: fx.Node, total: fx.Node) -> fx.Node:
    """Insert the summed weight of the targets, `sum(weight[target] * (target != ignore_index))`."""
    arguments: list[Any] = list(loss.args)
    target, weight, ignored = arguments[1], arguments[2], arguments[4]
    type_, shape = tensor_type(total), tensor_type(target)

    def call(op: Any, args: tuple[Any, ...], made: NodeType, **kwargs: Any) -> fx.Node:
        node = graph.call_function(op, args, kwargs)
        copy_meta(total, node, type=made, spec=None)
        return node

    valid = call(aten.ne.Scalar, (target, ignored), TensorType(torch.bool, shape.shape))
    values = TensorType(type_.dtype, shape.shape)
    terms = call(aten._to_copy.default, (valid,), values, dtype=type_.dtype)
    if weight is not None:
        safe = call(aten.mul.Tensor, (target, valid), shape)
        chosen = call(aten.index.Tensor, (weight, [safe]), values)
        terms = call(aten.mul.Tensor, (terms, chosen), values)
    return call(aten.sum.default, (terms,), type_)


@dataclass(frozen=True)
class ExposeCounts:
    """Compute loss denominators independently of the forward, so that micro-batches know these in advance.

    before: `%nll = aten.nll_loss_forward(%log_softmax, %y, None, 2, -100)`, `%total = getitem(%nll, 1)`
    after:  `%ne = aten.ne.Scalar(%y, -100)`, ..., `%sum = aten.sum(%_to_copy)` in place of `%total`
    """

    name = "expose-counts"
    requires = Level.CAPTURED
    ensures = Level.CAPTURED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        for node in list(gm.graph.nodes):
            source = node.args[0] if node.target is operator.getitem else None
            if not isinstance(source, fx.Node) or source.target not in _LOSSES or node.args[1] != 1:
                continue
            # the loss's own backward needs the total of exactly the samples that it sees
            users = [u for u in node.users if u.target not in _BACKWARDS]
            if users:
                with gm.graph.inserting_before(node.next):
                    count = _count(gm.graph, source, node)
                for user in users:
                    user.replace_input_with(node, count)
        return gm
