r"""What a rank holds over a step: parameters, gradients, and the values that live between two ops.

    bytes                 /\
                     /\  /  \/\          values of the forward that the backward still reads
              /\  /\/  \/      \__
       ______/  \/                \__    parameters, buffers and inputs are there all the time
       forward           backward

It counts the ops one by one in program order, as `compute="eager"` runs them; Inductor, which fuses ops and
computes some again, needs less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxdp.ir.notes import note
from fxdp.ir.op_kinds import is_view
from fxdp.ir.placements import Rows
from fxdp.ir.sizes import B
from fxdp.ir.slots import Buffer, Constant, Gradient, Input, Parameter, Slot
from fxdp.ir.types import TensorType, local_shape, tensor_types, type_bytes
from fxdp.pipeline.schedule.action import Kind
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.reports.rows import format_bytes

_POINTS = 240  # as many as a picture of some hundred pixels shows


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """What is held while `at`, an op or an action of the schedule, runs."""

    at: str
    phase: str
    bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class RankMemory:
    """What one rank holds over a step, in bytes.

    Attributes
    ----------
    rank : along the pipeline; data ranks hold alike.
    parameters, buffers, inputs : there all the time.
    gradients : of parameters, at the end of the step.
    points : all of it, from op to op.
    """

    rank: int
    parameters: int
    buffers: int
    inputs: int
    gradients: int
    points: tuple[MemoryPoint, ...]

    @property
    def peak(self) -> MemoryPoint:
        """The largest of the points."""
        still = MemoryPoint("", "", self.parameters + self.buffers + self.inputs)
        return max(self.points, key=lambda point: point.bytes, default=still)

    def __repr__(self) -> str:
        return f"RankMemory({self})"

    def __str__(self) -> str:
        peak = self.peak
        return (
            f"rank {self.rank}: at most {format_bytes(peak.bytes)} at {peak.at} ({peak.phase}); "
            f"parameters {format_bytes(self.parameters)}, gradients {format_bytes(self.gradients)}, "
            f"buffers {format_bytes(self.buffers)}, inputs {format_bytes(self.inputs)}"
        )


def curve(
    gm: fx.GraphModule, mesh_ranks: Mapping[str | None, int], sizes: Mapping[str, int], rank: int = 0
) -> RankMemory:
    """The memory of a program that is one part; `mesh_ranks` are the ranks along each axis, and all."""
    held = _Held(gm, mesh_ranks, sizes)
    still = held.still()
    points, live = [], sum(still.values())
    for node, change, freed in held.changes():
        live += change
        points.append(MemoryPoint(node.name, "backward" if note(node).backward else "forward", live))
        live -= freed
    return RankMemory(rank, **still, gradients=held.gradients(), points=thinned(points))


def scheduled_curves(
    parts: Sequence[fx.GraphModule], mesh_ranks: Mapping[str | None, int],
    sizes: Sequence[Mapping[str, int]], schedule: Schedule, gradients: Sequence[int],
    gathers: Sequence[fx.GraphModule | None] = (),
) -> tuple[RankMemory, ...]:  # fmt: skip
    """The memory of each pipeline rank: a forward keeps what its backward reads, for as long as that waits.

    `parts` are the stages, `sizes` those of each micro-batch, `gradients` the bytes of each stage's. Every
    rank holds all parameters; of those that `gathers` make whole, stage by stage, its rows.
    """
    held = [[_Held(part, mesh_ranks, one) for one in sizes] for part in parts]
    gathered = [None if gm is None else _Held(gm, mesh_ranks, sizes[0]) for gm in gathers]
    every = (*(one[0] for one in held), *(one for one in gathered if one is not None))
    sums = _summed({slot: size for one in every for slot, size in one.given().items()})
    whole = [0 if one is None else one.results() for one in gathered] or [0] * len(parts)
    del sums["inputs"]
    found = []
    for rank, row in enumerate(schedule.ranks):
        own = [s for s, home in enumerate(schedule.placement) if home == rank]
        inputs = max((sum(one.still()["inputs"] for one in held[s]) for s in own), default=0)
        live = sum(sums.values()) + inputs + sum(whole[stage] for stage in own)
        points, added = list[MemoryPoint](), set[int]()
        for action in row:
            one, forward = held[action.stage][action.microbatch], action.kind is Kind.FORWARD
            phase = "forward" if forward else "backward"
            points.append(MemoryPoint(str(action), phase, live + one.top(not forward)))
            if forward:
                live += one.saved()
            elif action.kind is not Kind.INPUT_GRADIENT:  # until then its weights' gradients need them
                live += (0 if action.stage in added else gradients[action.stage]) - one.saved()
                added.add(action.stage)
        summed = sum(gradients[stage] for stage in added)
        found.append(RankMemory(rank, **sums, inputs=inputs, gradients=summed, points=tuple(points)))
    return tuple(found)


def thinned(points: Sequence[MemoryPoint]) -> tuple[MemoryPoint, ...]:
    """The highest of each run of points, so that a picture of them keeps its peaks."""
    each = -(-len(points) // _POINTS)
    runs = (points[i : i + each] for i in range(0, len(points), max(each, 1)))
    return tuple(max(run, key=lambda point: point.bytes) for run in runs)


_WORDS = {Parameter: "parameters", Buffer: "buffers", Constant: "buffers", Input: "inputs"}


def _summed(given: Mapping[Slot, int]) -> dict[str, int]:
    found = dict.fromkeys(_WORDS.values(), 0)
    for slot, size in given.items():
        if type(slot) in _WORDS:
            found[_WORDS[type(slot)]] += size
    return found


class _Held:
    """The values of one graph on a rank: their bytes, who owns their memory, and until when they live."""

    def __init__(
        self, gm: fx.GraphModule, ranks: Mapping[str | None, int], sizes: Mapping[str, int]
    ) -> None:
        self._ranks, self._sizes = ranks, sizes
        self._nodes = list(gm.graph.nodes)
        self._output = gm.graph.output_node()
        self._home: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            source = node.args[0] if node.args else None
            shares = is_view(node.target)
            self._home[node] = self._home[source] if shares and isinstance(source, fx.Node) else node

    def bytes(self, node: fx.Node) -> int:
        """Of this rank's part of a value."""
        types, placed = tensor_types(note(node).type), note(node).placement
        placements = placed if isinstance(placed, tuple) else (placed,) * len(types)
        total = 0
        for type_, placement in zip(types, placements, strict=False):
            local = TensorType(type_.dtype, local_shape(type_, placement))
            size = type_bytes(local, self._sizes, unknown=self._sizes[B.name])
            total += -(-size // self._ranks[placement.axis]) if isinstance(placement, Rows) else size
        return total

    def given(self) -> dict[Slot, int]:
        """Bytes of what is there all the time."""
        nodes = (n for n in self._nodes if n.op == "placeholder")
        return {slot: self.bytes(n) for n in nodes if (slot := note(n).slot) is not None}

    def still(self) -> dict[str, int]:
        """The same, by what it is."""
        return _summed(self.given())

    def results(self) -> int:
        """Bytes of what the graph gives."""
        return sum(map(self.bytes, self._output.all_input_nodes))

    def gradients(self) -> int:
        """Bytes of the parameters' gradients."""
        of = {note(n).slot: n for n in self._nodes if n.op == "placeholder"}
        slots = (s.of for s in note(self._output).results if isinstance(s, Gradient))
        return sum(self.bytes(of[s]) for s in slots if isinstance(s, Parameter) and s in of)

    def changes(self) -> Iterable[tuple[fx.Node, int, int]]:
        """Per op the bytes that it adds, and those that nobody reads after it."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            for source in node.all_input_nodes:
                last[self._home[source]] = node
        dies: dict[fx.Node, list[fx.Node]] = {}
        for value, reader in last.items():
            if value.op == "call_function":
                dies.setdefault(reader, []).append(value)
        for node in self._nodes:
            if node.op == "call_function" and tensor_types(note(node).type):
                added = self.bytes(node) if self._home[node] is node else 0
                unread = added if node not in last and not node.users else 0
                yield node, added, sum(map(self.bytes, dies.get(node, ()))) + unread

    def saved(self) -> int:
        """Bytes of what the forward makes and the backward reads."""
        kept = {
            self._home[source]
            for node in self._nodes if note(node).backward
            for source in node.all_input_nodes if not note(source).backward
        }  # fmt: skip
        return sum(self.bytes(node) for node in kept if node.op == "call_function")

    def top(self, backward: bool) -> int:
        """The most bytes that live at once while one half runs, beside what was there before."""
        live = most = 0
        for node, added, freed in self.changes():
            if note(node).backward is backward:
                live += added
                most = max(most, live)
                live -= freed
        return most
