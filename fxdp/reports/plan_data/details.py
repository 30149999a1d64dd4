"""What a plan knows beyond its text, as rows: made when somebody asks, and then kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxdp.reports.plan_data.collective import Collective
from fxdp.reports.plan_data.memory_curve import RankMemory
from fxdp.reports.plan_data.parameter_table import ParameterRow
from fxdp.reports.rows import Explanation


@dataclass(frozen=True)
class Details:
    """What a plan was made of, and its rows.

    Attributes
    ----------
    model : the class of the model.
    mesh : the sizes of all axes, by name.
    batch : samples of the global batch.
    options : those of `fxdp.compile`, as text.
    choice : which strategy was chosen by memory, and why; empty where there was none to choose.
    explanations : why each node of `plan.graph` is placed as it is.
    """

    model: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    batch: int = 0
    options: tuple[str, ...] = ()
    choice: tuple[str, ...] = ()
    collectives: tuple[Collective, ...] = ()
    parameters: tuple[ParameterRow, ...] = ()
    memory: tuple[RankMemory, ...] = ()
    explanations: tuple[Explanation, ...] = ()

    def __call__(self) -> Details:
        """Itself: a plan asks by a call, whether the rows are made already or not."""
        return self
