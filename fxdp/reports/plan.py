"""The result of a compilation for the user: placements, collectives with their causes, timings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

from torch import fx

from fxdp.errors import InputError, StateError, a_kind
from fxdp.ir.axis_rows import AxisRow
from fxdp.ir.graph.graph_text import graph_text
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.schedule.transfers import Edge
from fxdp.reports.coverage import Coverage
from fxdp.reports.explained import Explained, explained
from fxdp.reports.graph_display import displayed
from fxdp.reports.page.plan_page import plan_page, write_file
from fxdp.reports.plan_data.collective import Collective
from fxdp.reports.plan_data.details import Details
from fxdp.reports.plan_data.memory_curve import ADAM, RankMemory, state_of_optimizer
from fxdp.reports.plan_data.parameter_table import ParameterRow
from fxdp.reports.plan_data.plan_diff import PlanDiff, differences
from fxdp.reports.plan_data.plan_json import (
    FORMAT,
    VERSION,
    checked,
    plain,
    read,
    read_as_written,
    read_coverage,
    read_schedule,
)
from fxdp.reports.plan_summary import Summary, headline, plan_sheets, summary_lines
from fxdp.reports.rows import CommRow, StageRow
from fxdp.reports.schedule_svg import DrawnSchedule, schedule_svg
from fxdp.reports.schedule_text import schedule_text, timetable
from fxdp.reports.sheet import sheets_html
from fxdp.version import __version__


@dataclass(frozen=True, repr=False)
class Plan:
    """A compiled program as a user reads it; printed or displayed, a plan shows a step's communication.

    Attributes
    ----------
    text : the program in golden text, equal on all ranks.
    communication : the collectives of one step as executed, with gradients in buckets.
    causes : the collectives before bucketing: one row per value, with the op and source line that need it.
    replicated : ops without a rule, which run replicated on every rank, with their source lines.
    timings : seconds for `capture`, for each pass by name, and for `lowering`.
    nodes : the number of nodes of the joint graph.
    covered : the result of `coverage()`.
    schedule : the order of stages and micro-batches; None for a program without stages and micro-batches.
    edges : the values sent between stages for each micro-batch.
    stages : one row per stage.
    error : the reason why the plan of a `CaptureError` is incomplete; empty for any other plan.
    """

    text: str
    communication: tuple[CommRow, ...]
    causes: tuple[CommRow, ...]
    replicated: tuple[str, ...]
    timings: Mapping[str, float] = field(default_factory=dict)
    nodes: int = 0
    covered: Coverage = field(default_factory=Coverage)
    schedule: Schedule | None = None
    edges: tuple[Edge, ...] = ()
    stages: tuple[StageRow, ...] = ()
    error: str = ""
    annotated: Callable[[], fx.GraphModule] | None = field(default=None, repr=False, compare=False)
    details: Callable[[], Details] = field(default=Details(), repr=False, compare=False)

    @property
    def graph(self) -> fx.GraphModule:
        """A new copy of the joint forward and backward graph of the global batch, with all collectives.

        Placeholders are named after the model's parameters, buffers and inputs, and nodes after torch's ops.
        The same model and example give the same names, which `fxdp explain` shows, too. Each node has

        - `node.meta["spec"]`: torch's `DTensorSpec` of the tensor: full shape, one placement per data axis,
          on the mesh given to `fxdp.compile`, or on a mesh without process groups; a tuple of specs for
          several results. Micro-batches are not an axis of this mesh.
        - `fxdp.ir.graph.metadata.meta(node)`: `placement`, the `reason` for the placement, the `cause` of a
          collective, and the `location` in the model's code.

        `print_readable()` shows full shapes and lines of code. To see the program that a rank runs, read
        `compiled.program`; the graph returned here is not executed.

        Raises
        ------
        StateError : the plan was pickled or made by hand, and so has no graph.
        """
        if self.annotated is None:
            raise StateError("this plan has no graph: a pickled plan leaves it behind; plan the model here")
        return displayed(self.annotated(), "the annotated graph of the global batch")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle: rows and texts without the graph, because ops cannot be pickled."""
        return {**vars(self), "annotated": None, "details": self.details()}

    def timetable(self) -> str:
        """Return the schedule on a time axis, one line per pipeline rank, one word per unit of time.

            rank 0: F0 F1 .  .  B0 B0 .  B1 B1
            rank 1: .  F0 B0 B0 F1 B1 B1

        A forward lasts one unit and a backward two, regardless of the costs of the stages.

        Raises
        ------
        StateError : the program has one stage and one micro-batch, so nothing is scheduled.
        """
        return timetable(self._scheduled())

    def schedule_svg(self) -> str:
        """Return the schedule as the text of an SVG picture, with transfers between ranks as lines.

        Raises
        ------
        StateError : as `timetable`.
        """
        return schedule_svg(self._scheduled(), edges=self.edges)

    def _scheduled(self) -> Schedule:
        if self.schedule is None:
            raise StateError(
                "the plan has no schedule: the program has one stage and one micro-batch; give the mesh a pp "
                "axis, or use fxdp.Pipeline(microbatches=...) above 1"
            )
        return self.schedule

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradient reductions of a step."""
        return sum(row.bytes for row in self.communication if row.gradient)

    def collectives(self) -> tuple[Collective, ...]:
        """Return the collectives of one step as executed: contents, cause, line of your code, and timing."""
        return self.details().collectives

    def parameters(self) -> tuple[ParameterRow, ...]:
        """Return the parameters that the program reads, each with placement and gradient reduction."""
        return self.details().parameters

    @property
    def choice(self) -> tuple[str, ...]:
        """What was chosen, with the reason: a strategy by the memory of each, a block by the time of each."""
        return self.details().choice

    @property
    def capture(self) -> tuple[str, ...]:
        """The strategy that captured the model, and why others were left before; empty for the first one."""
        return self.details().capture

    @property
    def axes(self) -> tuple[AxisRow, ...]:
        """The rows of each rank along each axis of the batch, in the call or the example."""
        return self.details().axes

    def memory(self, state: float = ADAM) -> tuple[RankMemory, ...]:
        """Return the memory of each pipeline rank over a step, op by op, before Inductor fuses ops.

        Parameters
        ----------
        state : the number of values that the optimizer keeps for each element of a parameter: 2 for Adam,
            1 for SGD with momentum, 0 for plain SGD.

        Raises
        ------
        InputError : `state` is not a number from 0 to 1024.
        """
        values = state_of_optimizer(state)
        return tuple(rank.with_state(values) for rank in self.details().memory)

    def explain(self, what: str) -> Explained:
        """Explain a placement, a collective or a line of code.

        Parameters
        ----------
        what : a line as in `models.py:12`, a parameter, a node of `plan.graph`, a collective, a module, or
            words of a node's line.

        Raises
        ------
        InputError : no part of the plan has this name; the message lists similar names.
        """
        return explained(self.details(), what)

    def diff(self, other: Plan) -> PlanDiff:
        """Compare with another plan: model, mesh, options, parameters, memory, and all communication.

        Raises
        ------
        InputError : `other` is not a plan.
        """
        given: object = other
        if not isinstance(given, Plan):
            raise InputError(
                f"diff: got {a_kind(given)}, expected a plan: of fxdp.plan(...), compiled.plan or "
                "fxdp.Plan.from_json(text)"
            )
        return differences(self.details(), other.details())

    def summary(self, width: int = 80) -> str:
        """Return stages, communication by line of your code, and coverage, as text of `width` columns."""
        return "\n".join(summary_lines(self, width))

    def to_json(self) -> str:
        """Return the plan without the graph as JSON, which `from_json` reads."""
        return json.dumps(self.as_dict(), indent=1)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan without the graph as plain values for JSON."""
        schedule = [] if self.schedule is None else schedule_text(self.schedule).splitlines()
        kept = ("text", "communication", "causes", "replicated", "timings", "nodes", "edges", "stages")
        return {
            "format": FORMAT,
            "version": VERSION,
            "fxdp": __version__,
            "torch": version("torch"),
            **plain(self.details()),
            **{name: plain(getattr(self, name)) for name in kept},
            "error": self.error,
            "coverage": self.covered.as_dict(),
            "gradient_bytes": self.gradient_bytes,
            "schedule_name": "" if self.schedule is None else self.schedule.name,
            "schedule": schedule,
        }

    def to_html(self, path: Path | str) -> None:
        """Write the plan as one HTML page, which needs neither network nor scripts.

        Raises
        ------
        InputError : the file cannot be written.
        """
        write_file(path, plan_page(self))

    def to_svg(self, path: Path | str) -> None:
        """Write the picture of the schedule.

        Raises
        ------
        StateError : as `timetable`.
        InputError : the file cannot be written.
        """
        write_file(path, self.schedule_svg())

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan written by `to_json`; the result has no graph.

        Raises
        ------
        InputError : the text is not a plan, or a plan of a different format version.
        """
        details, hints = fields(Details), get_type_hints(cls)
        kept = ("communication", "causes", "replicated", "timings", "nodes", "edges", "stages")
        found = checked(text, (*kept, *(field.name for field in details), "coverage", "schedule"))
        with read_as_written(found):
            edges = read(hints["edges"], found["edges"])
            schedule = read_schedule(found.get("schedule_name", ""), found["schedule"])
            return cls(
                text=found.get("text", ""),
                error=found.get("error", ""),
                covered=Coverage(read_coverage(found["coverage"]["rows"])),
                schedule=None if schedule is None else DrawnSchedule.of(schedule, edges),
                details=read(Details, {field.name: found[field.name] for field in details}),
                **{name: read(hints[name], found[name]) for name in kept},
            )

    def __repr__(self) -> str:
        return f"Plan({headline(self)})"

    def __str__(self) -> str:
        return self.summary()

    def __rich__(self) -> Summary:
        return Summary(self)

    def _repr_html_(self) -> str:
        pictures = [self.schedule_svg()] if self.schedule is not None else []
        return sheets_html(plan_sheets(self)) + "".join(pictures)

    def coverage(self) -> Coverage:
        """Report replicated ops and values that are communicated in full: cause, line, bytes, remedy."""
        return self.covered


def program_text(gm: fx.GraphModule, axes: Mapping[str, int]) -> str:
    """Return the golden text of a program, without causes."""
    return graph_text(gm, dict(axes), causes=False)
