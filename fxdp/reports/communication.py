"""The collectives of a program as rows: what, how large, why, carried by what."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from fxdp.capture.sites import Origin
from fxdp.ir import conversions
from fxdp.ir.carriers import carrier_name
from fxdp.ir.graph_text import target_text
from fxdp.ir.mesh import Mesh
from fxdp.ir.notes import Cause, note
from fxdp.ir.sizes import B
from fxdp.ir.types import type_bytes
from fxdp.reports.rows import CommRow


def communication(
    gm: fx.GraphModule, sizes: Mapping[str, int], mesh: Mesh | None = None, origin: Origin | None = None
) -> tuple[CommRow, ...]:
    """One row per collective in the graph, in order; bytes at the given sizes; carriers on the given mesh.

    With an `origin` a row's line is the user's own, where torch's modules run the op.
    """
    nodes = (node for node in gm.graph.nodes if node.target in conversions.COLLECTIVES)
    return tuple(_row(node, sizes, mesh, origin) for node in nodes)


def _row(node: fx.Node, sizes: Mapping[str, int], mesh: Mesh | None, origin: Origin | None) -> CommRow:
    known = note(node)
    cause = known.cause or Cause("", "", known.site)
    phase = "backward" if known.backward else "forward"
    by = "" if mesh is None else carrier_name(node, mesh)
    op, site = target_text(node.target), str(cause.site if origin is None else origin.of(cause.site))
    # a size that only the data knows counts as the batch's
    size = type_bytes(known.type, sizes, unknown=sizes.get(B.name))
    return CommRow(op, size, 1, cause.text, site, phase, cause.gradient, by)
