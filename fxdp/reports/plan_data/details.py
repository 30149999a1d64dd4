"""The contents of a plan as rows, computed on first request and then kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxdp.ir.axis_rows import AxisRow
from fxdp.reports.plan_data.collective import Collective
from fxdp.reports.plan_data.memory_curve import RankMemory
from fxdp.reports.plan_data.parameter_table import ParameterRow
from fxdp.reports.rows import Explanation


@dataclass(frozen=True)
class Details:
    """The inputs of a plan and its rows.

    Attributes
    ----------
    model : the class of the model.
    mesh : the sizes of all axes, by name.
    batch : samples of the global batch.
    options : the options of `fxdp.compile`, as text.
    choice : the strategy chosen by memory, with the reason; the time of blocks, with a proposal; or empty.
    capture : the strategy that captured the model, with the reasons for leaving others; empty for the first.
    explanations : the reason for the placement of each node of `plan.graph`.
    axes : the rows of each rank along each axis of the batch, in the call or the example.
    """

    model: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    batch: int = 0
    options: tuple[str, ...] = ()
    choice: tuple[str, ...] = ()
    capture: tuple[str, ...] = ()
    collectives: tuple[Collective, ...] = ()
    parameters: tuple[ParameterRow, ...] = ()
    memory: tuple[RankMemory, ...] = ()
    explanations: tuple[Explanation, ...] = ()
    axes: tuple[AxisRow, ...] = ()

    def __call__(self) -> Details:
        """Return this object, so that a plan can call finished rows like a function that computes rows."""
        return self
