"""Read the number of rows that a mask selects from the mask, not from these rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import copy_meta, meta, tensor_type
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import Shard
from fxdp.ir.types.sizes import is_axis
from fxdp.ir.types.value_types import TensorType
from fxdp.rules.families.indexing import MASKS
from fxdp.torch_compat import aten


@dataclass(frozen=True)
class CountMaskedRows:
    """Count rows that a mask selects by the mask alone, so that micro-batches know the number in advance.

    before: `%index = aten.index.Tensor(%losses, [%mask])`, `%sym_size = aten.sym_size.int(%index, 0)`
    after:  `%nonzero = aten.nonzero(%mask)`, `%sym_size = aten.sym_size.int(%nonzero, 0)`
    """

    name = "count-masked-rows"
    requires = Level.LOCAL
    ensures = Level.LOCAL

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        for node in gm.graph.find_nodes(op="call_function", target=aten.sym_size.int):
            rows: Any = node.args[0]
            mask, size = _mask(rows), tensor_type(rows).shape[node.args[1]]
            if mask is None or not is_axis(size):
                continue
            with gm.graph.inserting_before(node):
                chosen = gm.graph.call_function(aten.nonzero.default, (mask,))
            selected = TensorType(torch.int64, (size, len(tensor_type(mask).shape)))
            read = {"operands": (meta(mask).placement,), "rewrite": None, "cause": None}
            copy_meta(mask, chosen, spec=None, type=selected, placement=Shard(0), **read)
            node.args = (chosen, 0)
        return gm


def _mask(rows: fx.Node) -> fx.Node | None:
    """Return the mask of which a node has the selected rows; its size is then read along these rows."""
    if rows.target is not aten.index.Tensor:
        return None
    found: list[Any] = [index for index in rows.args[1] if index is not None]  # type: ignore[union-attr]
    return found[0] if len(found) == 1 and tensor_type(found[0]).dtype in MASKS else None
