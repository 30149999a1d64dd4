"""Reduce gradients across ranks in the dtype that the user asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import copy_meta, meta, tensor_type
from fxdp.ir.graph.signature import Gradient, Parameter
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import Partial, Placement
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import aten

_RULE = "reduce_dtype"


def _casts_terms(node: fx.Node, dtype: torch.dtype) -> bool:
    """Return whether a gradient is a cast, with no further user, of partial terms in the wanted dtype."""
    if node.target is not aten._to_copy.default or len(node.users) > 1:
        return False
    (source,) = node.all_input_nodes
    return tensor_type(source).dtype == dtype and isinstance(meta(source).placement, Partial)


def _cast(node: fx.Node, dtype: torch.dtype, placement: Placement) -> fx.Node:
    """Insert a cast right after a node, with the given placement of operand and result."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    type_ = TensorType(dtype, tensor_type(node).shape)
    copy_meta(node, made, type=type_, operands=(placement,), reason=_RULE, rewrite=None, decomposition=None)
    return made


@dataclass(frozen=True)
class CastReductions:
    """Reduce each parameter's gradient across ranks in `dtype`, then cast the sum to the original dtype.

    before: `%to: f32[8] {dp=P(sum)} = aten._to_copy(%mm)` of `%mm: bf16[8]`, returned as `gradient param(w)`
    after:  `%to: f32[8] {dp=R} = aten._to_copy(%mm)`, which reads the sum of `%mm`, where `dtype` is bfloat16

    A gradient in a different dtype is cast to `dtype` before the reduction and back afterwards. Gradients
    that later backwards accumulate are in the parameter's own dtype, so no running sum is rounded.
    """

    dtype: torch.dtype | None = None

    name = "cast-reductions"
    requires = Level.PLACED
    ensures = Level.PLACED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Annotate the graph in place, and insert casts."""
        if self.dtype is None or mesh.size == 1:
            return gm
        output = gm.graph.output_node()
        values = list(output.args[0])  # type: ignore[arg-type]
        known = zip(meta(output).results, values, meta(output).operands, strict=True)
        for place, (spec, value, wanted) in enumerate(known):
            if isinstance(spec, Gradient) and isinstance(spec.of, Parameter) and wanted is not None:
                values[place] = self._summed(value, wanted)
        output.args = (tuple(values),)
        return gm

    def _summed(self, value: fx.Node, wanted: Placement) -> fx.Node:
        """Return the gradient in the original dtype, after a reduction in `dtype`."""
        own, terms = tensor_type(value).dtype, meta(value).placement
        if own == self.dtype or self.dtype is None:
            return value
        if not _casts_terms(value, self.dtype):
            if not isinstance(terms, Partial):
                return value
            value = _cast(_cast(value, self.dtype, terms), own, terms)
        meta(value).operands, meta(value).placement = (wanted,), wanted
        return value
