"""The plan of a model that cannot be captured: the facts known without a graph, and the capture error."""

from __future__ import annotations

from torch import nn

from fxdp.capture.locations import Origin
from fxdp.ir.types.mesh import Mesh
from fxdp.options import Options
from fxdp.reports.plan import Plan
from fxdp.reports.plan_data.details import Details
from fxdp.reports.plan_data.parameter_table import parameter_row


def partial_plan(
    model: nn.Module, mesh: Mesh, options: Options, batch: int, error: Exception, origin: Origin
) -> Plan:
    """Return a plan with the placement of parameters and the error, but without communication."""
    rows = tuple(
        parameter_row(name, parameter, mesh, origin.call, rows=options.shards)
        for name, parameter in model.named_parameters()
    )
    details = Details(type(model).__name__, mesh.entire, batch, tuple(options.lines()), parameters=rows)
    return Plan("", (), (), (), error=str(error), details=details)
