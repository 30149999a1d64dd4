r"""Predict the memory of a rank over a step: parameters, gradients, and values that live between ops.

    bytes                 /\
                     /\  /  \/\          values of the forward that the backward still reads
              /\  /\/  \/      \__
       ______/  \/                \__    parameters, buffers and inputs, held all the time
       forward           backward

Ops are counted one by one in program order, as `backend="eager"` runs them; Inductor, which fuses ops and
recomputes some values, needs less. Optimizer state is held all the time, too: by default two values per
element, as for Adam.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from fxdp.errors import InputError
from fxdp.ir.graph.signature import Parameter
from fxdp.pipeline.schedule.action import Action, Kind
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.reports.plan_data.live_values import LiveValues, summed
from fxdp.reports.rows import format_bytes

_POINTS = 240  # enough for a picture of some hundred pixels
ADAM = 2
"""The number of values that Adam keeps for each element of a parameter."""


@dataclass(frozen=True, slots=True)
class _MemoryPoint:
    """The bytes that are held while `at` runs, an op or an action of the schedule."""

    at: str
    phase: str
    bytes: int

    def __str__(self) -> str:
        where = f"at {self.at} ({self.phase})"
        if self.at[:1].isdigit():  # an action, as `0B1`; names of ops begin with a letter
            action = Action.parse(self.at)
            where = f"in the {self.phase} of micro-batch {action.microbatch} in stage {action.stage}"
        return f"at most {format_bytes(self.bytes)} {where}"


@dataclass(frozen=True, slots=True, repr=False)
class RankMemory:
    """The memory of one rank over a step, in bytes.

    Attributes
    ----------
    rank : the rank along the pipeline; all data ranks hold equal amounts.
    parameters, buffers, inputs : held all the time.
    gradients : gradients of parameters, at the end of the step.
    points : total bytes, from op to op.
    optimizer : optimizer state, held all the time.
    shared : buffers through which ranks of one host exchange large values, held all the time.
    full : parameters that stay unsharded after a gather, held all the time.
    at_peak : the bytes of the highest point by kind: the names above, `saved` activations, `buckets` of
        gradients and of gathered parameters in flight, `temporary` values.
    """

    rank: int
    parameters: int
    buffers: int
    inputs: int
    gradients: int
    points: tuple[_MemoryPoint, ...]
    optimizer: int = 0
    shared: int = 0
    full: int = 0
    at_peak: Mapping[str, int] = field(default_factory=dict)

    @property
    def still(self) -> int:
        """The bytes that are held all the time."""
        return self.parameters + self.buffers + self.inputs + self.optimizer + self.shared + self.full

    @property
    def peak(self) -> _MemoryPoint:
        """The point with the most bytes."""
        return max(self.points, key=lambda point: point.bytes, default=_MemoryPoint("", "", self.still))

    def with_state(self, values: float) -> RankMemory:
        """Return this memory for an optimizer with `values` values per element instead of Adam's two."""
        state = round(self.optimizer * values / ADAM)
        more = state - self.optimizer
        points = tuple(replace(point, bytes=point.bytes + more) for point in self.points)
        return replace(self, optimizer=state, points=points, at_peak={**self.at_peak, "optimizer": state})

    def __repr__(self) -> str:
        return f"RankMemory(rank {self.rank}: {self.peak})"

    def __str__(self) -> str:
        parts = ", ".join(f"{_SPOKEN[name]} {format_bytes(n)}" for name, n in self.at_peak.items() if n)
        return f"rank {self.rank}: {self.peak}: {parts}"


_SPOKEN = {
    "parameters": "parameters", "full": "unsharded parameters", "gradients": "gradients",
    "optimizer": "optimizer state",
    "saved": "saved activations", "buckets": "buckets in flight", "temporary": "temporary values",
    "buffers": "buffers", "inputs": "inputs", "shared": "memory shared with other ranks",
}  # fmt: skip


def state_of_optimizer(values: object) -> float:
    """Check the number of values that an optimizer keeps for each element.

    Raises
    ------
    InputError : `values` is not a number from 0 to 1024.
    """
    if not isinstance(values, (int, float)) or isinstance(values, bool) or not 0 <= values < 1024:
        raise InputError(
            f"plan.memory(state=...) is {values!r}, expected how many values the optimizer keeps for each "
            "element of a parameter: 2 for Adam and AdamW, 1 for SGD with momentum, 0 for plain SGD"
        )
    return values


def curve(
    gm: fx.GraphModule, mesh_ranks: Mapping[str | None, int], sizes: Mapping[str, int],
    shared: int = 0, gather: fx.GraphModule | None = None,
    shown: Callable[[fx.Node], bool] = lambda node: False,
) -> RankMemory:  # fmt: skip
    """Return the memory of a program in one part.

    `mesh_ranks` gives the number of ranks along each axis, and of all ranks under None. `gather` makes the
    unsharded parameters that stay from step to step; `shown` says which gathers copy nothing.
    """
    held = LiveValues(gm, mesh_ranks, sizes, shares=shared > 0, shown=shown)
    sums, gradients = summed(held.given()), held.gradients()
    state = {"optimizer": ADAM * gradients, "shared": shared}
    points, live = [], Counter[str]({**sums, **state})
    highest = live.copy()
    if gather is not None:
        gathered = LiveValues(gather, mesh_ranks, sizes)
        highest = live + gathered.top(backward=False)
        points.append(_MemoryPoint("gather", "forward", highest.total()))
        state["full"] = live["full"] = gathered.results()
    for moment in held.moments():
        live.subtract(moment.dropped)
        live.update(moment.added)
        highest = live.copy() if live.total() > highest.total() else highest
        points.append(_MemoryPoint(moment.node.name, moment.phase, live.total()))
        live.subtract(moment.freed)
    by_kind = _named(highest)
    return RankMemory(
        0, **sums, **state, gradients=gradients, points=_thinned(points), at_peak=by_kind
    )  # fmt: skip


def scheduled_curves(
    parts: Sequence[fx.GraphModule], mesh_ranks: Mapping[str | None, int],
    sizes: Sequence[Mapping[str, int]], schedule: Schedule, gradients: Sequence[Mapping[Parameter, int]],
    gathers: Sequence[fx.GraphModule | None] = (), *, owned: bool = False,
) -> tuple[RankMemory, ...]:  # fmt: skip
    """Return the memory of each pipeline rank; saved activations are held until the backward runs.

    `parts` are the stages, `sizes` the sizes of each micro-batch, `gradients` the bytes of each stage's
    gradients. Every rank holds all parameters, and only a shard of each parameter that `gathers` unshard,
    stage by stage. The optimizer has state for all parameters of a rank, or (`owned`) for the parameters of
    its stages.
    """
    held = [[LiveValues(part, mesh_ranks, one) for one in sizes] for part in parts]
    gathered = [None if gm is None else LiveValues(gm, mesh_ranks, sizes[0]) for gm in gathers]
    every = (*(one[0] for one in held), *(one for one in gathered if one is not None))
    given = {spec: size for one in every for spec, size in one.given().items()}
    sums = summed(given)
    full = [0 if one is None else one.results() for one in gathered] or [0] * len(parts)
    del sums["inputs"]
    found = []
    for rank, row in enumerate(schedule.ranks):
        own = [s for s, home in enumerate(schedule.placement) if home == rank]
        trained = {of for s in (own if owned else range(len(parts))) for of in gradients[s]}
        state = {"optimizer": ADAM * sum(given.get(of, 0) for of in trained)}
        inputs = {"inputs": max((summed(one.given())["inputs"] for s in own for one in held[s]), default=0)}
        live = Counter[str]({**sums, **state, **inputs, "buckets": sum(full[stage] for stage in own)})
        points, highest, made = _along(row, held, [sum(sizes.values()) for sizes in gradients], live)
        kept = {**sums, **inputs, **state, "gradients": made}
        found.append(RankMemory(rank, **kept, points=points, at_peak=highest))
    return tuple(found)


def _along(
    row: Sequence[Action], held: Sequence[Sequence[LiveValues]], gradients: Sequence[int], live: Counter[str]
) -> tuple[tuple[_MemoryPoint, ...], dict[str, int], int]:
    """Return the bytes at each action of a rank, the highest point by kind, and the gradients at the end."""
    points, added, highest = list[_MemoryPoint](), set[int](), live.copy()
    for action in row:
        one, forward = held[action.stage][action.microbatch], action.kind is Kind.FORWARD
        now = live + one.top(not forward)
        highest = now if now.total() > highest.total() else highest
        points.append(_MemoryPoint(str(action), "forward" if forward else "backward", now.total()))
        if forward:
            live["saved"] += one.saved()
        elif action.kind is not Kind.INPUT_GRADIENT:  # before, weight gradients need the saved activations
            live["saved"] -= one.saved()
            live["gradients"] += 0 if action.stage in added else gradients[action.stage]
            added.add(action.stage)
    return tuple(points), _named(highest), live["gradients"]


def _named(live: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes by kind, in the order of display."""
    return {name: live.get(name, 0) for name in _SPOKEN}


def _thinned(points: Sequence[_MemoryPoint]) -> tuple[_MemoryPoint, ...]:
    """Keep the highest point of each run of points, so that a picture keeps its peaks."""
    each = -(-len(points) // _POINTS)
    runs = (points[i : i + each] for i in range(0, len(points), max(each, 1)))
    return tuple(max(run, key=lambda point: point.bytes) for run in runs)
