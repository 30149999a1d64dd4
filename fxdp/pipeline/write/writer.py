"""Write one rank's program of a step: stage calls, transfers and sums, in the order of the schedule.

    %microbatch_0 = microbatch(%batch, 0, 0, 2, [0, 0])
    %forward_0_mb0 = forward_0(%microbatch_0)                 -> results, saved
    %after_forward_0_mb0 = record_event('compute')            -> an event; see `events.py`
    %p2p_forward_waits = wait_event('p2p_forward', %after_forward_0_mb0)
    %send_add_3_mb0_to1 = send_forward(%add_3_mb0, 1, 0, stream='p2p_forward')
    ...
    %receive_add_9_mb0_from1 = receive_backward([2, 6, 16], float32, 1, 1, stream='p2p_backward')
    %add_9_mb0 = wait(%receive_add_9_mb0_from1)
    %sums_0 = sums_0()                                        -> zeros, to which each backward adds
    %backward_0_mb0 = backward_0(%saved_0_mb0, %sums_0, %add_9_mb0)
    ...
    %mm_7 = %sums_0[0]
    %finish_0 = finish_0(%batch, %mm_7, ..., stream='reduce')
    return results

All ranks walk the same order of events and each rank writes its own share, so a send and the matching
receive are written at the same position of that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxdp.pipeline.cut.partition import CutEdge, Partition, backward_gives, backward_parts, forward_gives
from fxdp.pipeline.schedule.action import Action, Kind
from fxdp.pipeline.schedule.deadlock import check
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.schedule.transfers import End, Transfer, programs
from fxdp.pipeline.write.finish import Finish
from fxdp.pipeline.write.gathers import take_gathered, write_gather_step, write_gathers
from fxdp.pipeline.write.happens_before import check_order
from fxdp.pipeline.write.microbatches import MicrobatchSizes, Recompute, microbatch_call
from fxdp.pipeline.write.round_calls import RoundCalls
from fxdp.pipeline.write.stage_shards import StageShards
from fxdp.pipeline.write.step_graph import Message, StepGraph, suffix
from fxdp.pipeline.write.step_values import StepValues
from fxdp.pipeline.write.totals import Totals


@dataclass
class Writer:
    """Writer of the program of one rank.

    Parameters
    ----------
    step : graph of the rank, with the sizes of all micro-batches.
    partition : the parts.
    schedule : the actions of all ranks.
    layout : start and size of each micro-batch within the local batch; for blocks, their numbers.
    batch_dims : the batch dim of each input.
    axes : of a ragged batch the axis of each input's rows, and the one into which its values point.
    everywhere : True if all ranks get the gradients, False for only the stage that owns the parameter.
    recompute : the micro-batches for which no activations are saved.
    data_ranks : number of ranks that share the batch.
    keeps_unsharded : True if gathered parameters stay from step to step, and are an input.
    """

    step: StepGraph
    partition: Partition
    schedule: Schedule
    layout: MicrobatchSizes
    batch_dims: Sequence[int | None]
    axes: Sequence[tuple[str, str | None]]
    everywhere: bool
    recompute: Recompute
    data_ranks: int
    keeps_unsharded: bool = False
    _saved: dict[tuple[int, int], fx.Node] = field(default_factory=dict)
    _rest: dict[tuple[int, int], fx.Node] = field(default_factory=dict)
    _sums: dict[int, fx.Node] = field(default_factory=dict)
    _batches: dict[int, fx.Node] = field(default_factory=dict)
    _totals: Totals = field(init=False)

    def __post_init__(self) -> None:
        self._totals = Totals(self.step, self.partition, self.layout)

    def write(self) -> fx.Graph:
        """Return the program; the one input is the full local batch, the results are those of the partition.

        Raises
        ------
        DeadlockError : ranks that could wait for one another forever.
        VerifierError : a stream reads a value without a wait; a bug in fxdp.
        """
        self.full = self.step.input("batch")
        self.step.tag = self._last_tag
        sharded = StageShards(self.step, self.partition, self.schedule)
        values = StepValues(self.step, self.partition, self.schedule.placement)
        self._prologue(sharded)
        self._rounds(values)
        if not self.partition.coupled:
            self._run_schedule()
        self._put_together()
        finish = Finish(
            self.step, self.partition, self.schedule, self.full, sharded, values, self.everywhere,
            self.data_ranks > 1,
        )  # fmt: skip
        self.step.end(tuple(finish.write()))
        check_order(self.step.graph)
        return self.step.graph

    def write_gathers(self, step: StepGraph) -> fx.Graph:
        """Return the gather program for full parameters that are kept from step to step.

        This program runs before the step if shards have changed.

        Raises
        ------
        VerifierError : a stream reads a value without a wait; a bug in fxdp.
        """
        step.tag = self._last_tag
        return write_gather_step(step, self.partition, self.schedule, aligned=self._by_block)

    @property
    def _by_block(self) -> bool:
        return self.layout.blocks is not None

    @property
    def _last_tag(self) -> int:
        """Number of the last transfer between stages."""
        return len(self.partition.edges) * self.schedule.microbatches

    def _edges(self) -> list[CutEdge]:
        """Return the edges between ranks; if several stages of one rank read a value, only the first edge."""
        placement = self.schedule.placement
        found: dict[tuple[str, int, int], CutEdge] = {}
        for edge in self.partition.edges:
            if placement[edge.source] != placement[edge.target]:
                found.setdefault((edge.name, edge.source, placement[edge.target]), edge)
        return list(found.values())

    def _prologue(self, sharded: StageShards) -> None:
        if (part := self.partition.prologue) is not None:
            self.step.keep_items(self.step.module("prologue", (self.full,), "prologue"), part.gives)
        if self.keeps_unsharded:
            take_gathered(self.step, self.partition, self.schedule, sharded)
        else:
            write_gathers(
                self.step, self.partition, self.schedule, sharded, self.full, aligned=self._by_block
            )

    def _rounds(self, values: StepValues) -> None:
        placement = self.schedule.placement
        RoundCalls(
            self.step, self.partition, placement, self.layout, self._totals, values, self.full, self._batch
        ).write()

    def _run_schedule(self) -> None:
        order = programs(self.schedule, self._edges())
        check(order)
        for event in order[self.step.rank]:
            if isinstance(event, Transfer):
                self._transfer(event)
            else:
                self._act(event)

    def _batch(self, microbatch: int) -> fx.Node:
        if microbatch not in self._batches:
            take, args = microbatch_call(self.layout, microbatch, self.batch_dims, self.axes)
            name = f"{take.__name__}_{microbatch}"
            self._batches[microbatch] = self.step.function(take, (self.full, *args), name)
        return self._batches[microbatch]

    # ---- actions -----------------------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            self._forward(stage, microbatch)
        elif not self._has_backward(stage):
            self.step.settle((stage, microbatch))
        elif action.kind is Kind.BACKWARD:
            self._backward(stage, microbatch)
        elif action.kind is Kind.INPUT_GRADIENT:
            self._input_gradient(stage, microbatch)
        else:
            self._weight_gradient(stage, microbatch)

    def _has_backward(self, stage: int) -> bool:
        """Return whether a stage has gradients to compute; not if this and all earlier stages are frozen."""
        return bool(backward_gives(self.partition.parts[stage]))

    def _forward(self, stage: int, microbatch: int) -> None:
        made = self._call_forward("forward", stage, microbatch)
        gives = forward_gives(self.partition.parts[stage])
        self._give_all(made, gives, stage, microbatch)
        if self.schedule.trains and microbatch not in self.recompute and self._has_backward(stage):
            self._save(made, len(gives), stage, microbatch)

    def _call_forward(self, word: str, stage: int, microbatch: int) -> fx.Node:
        batch = self._batch(microbatch)
        names = [c.name for c in self.partition.parts[stage].reads if not c.backward]
        if self.schedule.trains and self._has_backward(stage) and self.step.waits_for(names, microbatch):
            self._sums_of(stage)  # while waiting for other ranks
        args = [self.step.value(name, microbatch) for name in names]
        name = f"{word}_{stage}{suffix(microbatch)}"
        return self.step.module(f"forward_{stage}", (batch, *args), name)

    def _save(self, made: fx.Node, index: int, stage: int, microbatch: int) -> None:
        name = f"saved_{stage}{suffix(microbatch)}"
        self._saved[stage, microbatch] = self.step.item(made, index, name)

    def _call_backward(self, word: str, stage: int, microbatch: int) -> fx.Node:
        part = self.partition.parts[stage]
        if microbatch in self.recompute:
            again = self._call_forward("recompute", stage, microbatch)
            self._save(again, len(forward_gives(part)), stage, microbatch)
        sums = self._sums_of(stage)  # before waiting for a gradient
        args = [self.step.value(c.name, microbatch) for c in part.reads if c.backward]
        self.step.settle((stage, microbatch))
        saved: list[Any] = [self._saved.pop((stage, microbatch))]
        if word == "backward":
            saved.append(sums)
        return self.step.module(f"{word}_{stage}", (*saved, *args), f"{word}_{stage}{suffix(microbatch)}")

    def _sums_of(self, stage: int) -> fx.Node | tuple[()]:
        """Return the buffers to which every backward of a stage adds, created before the first."""
        if not self.partition.parts[stage].summed:
            return ()
        if stage not in self._sums:
            self._sums[stage] = self.step.module(f"sums_{stage}", (), f"sums_{stage}")
        return self._sums[stage]

    def _backward(self, stage: int, microbatch: int) -> None:
        made = self._call_backward("backward", stage, microbatch)
        self._give_all(made, backward_gives(self.partition.parts[stage]), stage, microbatch)

    def _input_gradient(self, stage: int, microbatch: int) -> None:
        made = self._call_backward("input_gradient", stage, microbatch)
        first, _ = backward_parts(self.partition, stage)
        self._give_all(made, first, stage, microbatch)
        name = f"rest_{stage}{suffix(microbatch)}"
        self._rest[stage, microbatch] = self.step.item(made, len(first), name)

    def _weight_gradient(self, stage: int, microbatch: int) -> None:
        name = f"weight_gradient_{stage}{suffix(microbatch)}"
        args = (self._rest.pop((stage, microbatch)), self._sums_of(stage))
        made = self.step.module(f"weight_gradient_{stage}", args, name)
        _, later = backward_parts(self.partition, stage)
        self._give_all(made, later, stage, microbatch)

    # ---- values ------------------------------------------------------------------------------------------

    def _give_all(self, made: fx.Node, names: Sequence[str], stage: int, microbatch: int) -> None:
        summed = self.partition.parts[stage].summed
        for index, name in enumerate(n for n in names if n not in summed):
            value = self.step.item(made, index, f"{name}{suffix(microbatch)}")
            self.step.keep(name, microbatch, value)
            total = self.partition.totals.get(name)
            if total is not None and total.stage == stage:
                self._totals.add(name, microbatch, value)

    def _put_together(self) -> None:
        """Turn the totals of micro-batches into values of the step."""
        for stage, sums in self._sums.items():
            part = self.partition.parts[stage]
            self.step.keep_items(sums, [n for n in backward_gives(part) if n in part.summed])
        self._totals.put_together()

    def _first(self, stage: int) -> int:
        """Return the first micro-batch of a stage, after which the stage sends values of the step."""
        row = self.schedule.ranks[self.step.rank]
        return next(a.microbatch for a in row if a.stage == stage and a.kind is Kind.FORWARD)

    def _transfer(self, event: Transfer) -> None:
        edge, microbatch = event.edge, event.microbatch
        assert isinstance(edge, CutEdge)
        # equal at both ends, and unique among the transfers of the step
        tag = self.partition.edges.index(edge) * self.schedule.microbatches + (microbatch or 0)
        shape = self.step.shape(edge.type, edge.placement, microbatch)
        name = f"{edge.name}{suffix(microbatch)}"
        message = Message(name, shape, edge.type.dtype, tag, edge.backward, row=edge.name)
        if event.end is End.SEND:
            made = self._first(edge.source) if microbatch is None else microbatch
            origin = None if edge.backward else (edge.source, made)
            self.step.send(message, self.step.value(edge.name, made), event.peer, origin)
        else:
            self.step.expect(edge.name, microbatch, self.step.receive(message, event.peer))
