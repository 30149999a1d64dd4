"""Refuse tables with sparse gradients where gradients are sharded, or parameters belong to stages.

The rows of a sparse gradient are those of the batch: no rank has a part of them by rows of the parameter.
"""

from __future__ import annotations

from torch import fx

from fxdp.capture.locations import Origin
from fxdp.errors import MeshError
from fxdp.ir.graph.gradient_rows import sparse_gradients
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.redistribution_cause import unconverted
from fxdp.ir.ops.library import aten


def check_sparse_gradients(
    graph: fx.Graph, origin: Origin, strategy: str, *, stages: bool, microbatches: bool
) -> None:
    """Raise if a captured graph has sparse gradients that this strategy, stages or micro-batches cannot take.

    Raises
    ------
    MeshError : names the parameter, the line that reads it, and the remedy.
    """
    for spec, node in sparse_gradients(graph).items():
        where = f"{origin.of(meta(node).location).where}: {spec.name} is read with sparse=True"
        if stages or strategy != "replicate":
            raise MeshError(
                f"{where}, so its gradient has rows of the batch, not of the parameter; expected "
                f"strategy='replicate' (got {strategy!r}) and no pp axis. Or pass sparse=False"
            )
        if microbatches and unconverted(node).target is aten.cat.default:
            raise MeshError(
                f"{where} at several lines, whose rows micro-batches cannot put in one order; expected one "
                "line that reads it, or fxdp.Pipeline(microbatches=1). Or pass sparse=False"
            )
