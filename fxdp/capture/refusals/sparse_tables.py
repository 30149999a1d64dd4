"""Refuse tables with sparse gradients where gradients are sharded, or added up over micro-batches.

The rows of a sparse gradient are those of the batch: no rank has a part of them by rows of the parameter, and
micro-batches cannot be added up row by row.
"""

from __future__ import annotations

from torch import fx

from fxdp.capture.locations import Origin
from fxdp.errors import MeshError
from fxdp.ir.graph.gradient_rows import sparse_gradients
from fxdp.ir.graph.metadata import meta


def check_sparse_gradients(graph: fx.Graph, origin: Origin, strategy: str, *, cut: bool) -> None:
    """Raise if a captured graph has sparse gradients that this strategy, or stages, cannot take.

    Raises
    ------
    MeshError : names the parameter, the line that reads it, and the remedy.
    """
    for spec, node in sparse_gradients(graph).items():
        if cut or strategy != "replicate":
            raise MeshError(
                f"{origin.of(meta(node).location).where}: {spec.name} is read with sparse=True, so its "
                "gradient has rows of the batch, not of the parameter; expected strategy='replicate' (got "
                f"{strategy!r}), no pp axis and fxdp.Pipeline(microbatches=1). Or pass sparse=False"
            )
