"""Turn numbers that are added to a loss into tensors, so that one rank can add each for all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import copy_meta, meta, tensor_type
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import aten

_SUMS = {
    aten.add.Tensor: aten.add.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Tensor: aten.sub.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.rsub.Scalar: aten.rsub.Tensor,
    aten.rsub.Tensor: aten.rsub.Tensor,
}
"""For each sum or difference of a tensor and a number, the op for two tensors."""

_EXACT = (torch.float32, torch.float64)
"""Dtypes in which adding a number equals adding a tensor of this number.

Half precision would round the number first.
"""


@dataclass(frozen=True)
class LiftScalars:
    """Replace numbers added to scalar tensors by tensors; terms of a loss then add up before their reduction.

    before: `%rsub = aten.rsub.Scalar(%mean, 1)`
    after:  `%full = aten.full([], 1)`, `%rsub = aten.rsub.Tensor(%mean, %full)`
    """

    name = "lift-scalars"
    requires = Level.CAPTURED
    ensures = Level.CAPTURED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        for node in list(gm.graph.nodes):
            type_ = meta(node).type
            if node.target not in _SUMS or not isinstance(type_, TensorType) or type_.shape != ():
                continue
            x, number, *rest = node.args
            same = isinstance(x, fx.Node) and meta(x).type == type_ and not rest
            if same and type_.dtype in _EXACT and isinstance(number, (int, float)):
                node.target = _SUMS[node.target]
                node.args = (x, _as_dynamic(node, number))
        return gm


def _as_dynamic(node: fx.Node, number: float) -> fx.Node:
    dtype = tensor_type(node).dtype
    with node.graph.inserting_before(node):
        made = node.graph.call_function(aten.full.default, ([], number), {"dtype": dtype})
    copy_meta(node, made, spec=None)
    return made
