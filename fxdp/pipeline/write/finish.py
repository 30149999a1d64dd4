"""The end of a step's program: bring sums to their stages, run epilogues, send results to all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.signature import Gradient, OutputSpec, Parameter
from fxdp.ir.types.value_types import TensorType
from fxdp.pipeline.cut.partition import Part, Partition
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.write.stage_shards import StageShards
from fxdp.pipeline.write.step_graph import StepGraph
from fxdp.pipeline.write.step_values import StepValues


@dataclass
class Finish:
    """Writer of everything after the last micro-batch.

    Parameters
    ----------
    sharded : writer of transfers of shards between pipeline ranks.
    everywhere : True if all ranks get the gradients, False if only ranks whose stages read the parameter do.
    parallel : True if several data ranks share the batch, so that sums go over ranks.
    """

    step: StepGraph
    partition: Partition
    schedule: Schedule
    full: fx.Node
    sharded: StageShards
    values: StepValues
    everywhere: bool
    parallel: bool

    def write(self) -> list[Any]:
        """Return the program's results, None for each result that stays on another rank."""
        # an epilogue is on the least stage that it reads from, so its operands come from later stages
        for stage in reversed(range(self.partition.stages)):
            part = self.partition.epilogues[stage]
            if part is None:
                continue
            for crossing in part.reads:
                self.values.bring(crossing.name, stage)
            if self.schedule.placement[stage] == self.step.rank:
                args = [self.step.total(c.name) for c in part.reads]
                call = self.step.reduce if self.parallel and _communicates(part) else self.step.module
                made = call(f"finish_{stage}", (self.full, *args), f"finish_{stage}")
                self.step.keep_items(made, part.gives)
        for rank in range(len(self.schedule.ranks)):
            self._deliver(rank)
            self.sharded.send_to_owners(
                {n: t for n, t in self._sharded.items() if self.values.home(n) == rank}, rank
            )
        return [self._result(spec, name) for spec, name, _ in self.partition.results]

    @cached_property
    def _sharded(self) -> dict[str, TensorType]:
        """Gradients whose shards go to the ranks that hold the parameter's shards."""
        types = self.sharded.types
        specs = {n: spec.of for spec, n, _ in self.partition.results if isinstance(spec, Gradient)}
        return {n: types[of] for n, of in specs.items() if isinstance(of, Parameter) and of in types}

    def _deliver(self, rank: int) -> None:
        """Send one rank's results to all ranks that need one.

        Results for one receiver are packed into one buffer of bytes; receivers of equal results share the
        buffer.
        """
        receivers: dict[tuple[str, ...], list[int]] = {}
        for peer in range(len(self.schedule.ranks)):
            names = self._delivered(rank, peer)
            if peer != rank and names:
                receivers.setdefault(names, []).append(peer)
        for names, peers in receivers.items():
            types = {name: self.values.type(source) for name in names if (source := self.values.source(name))}
            given = partial(self.step.value, microbatch=None)
            got = self.step.hand_over("results", types, rank, peers, given, backward=False, shared=True)
            for name, value in got.items():
                self.step.keep(name, None, value)

    def _delivered(self, rank: int, peer: int) -> tuple[str, ...]:
        """Return the names of the results that `rank` sends to `peer`."""
        names = []
        for spec, name, _ in self.partition.results:
            source = self.values.source(name)
            if source is None or self.values.home(name) != rank or name in self._sharded:
                continue
            if self._is_for(peer, spec):
                names.append(name)
        return tuple(dict.fromkeys(names))

    def _is_for(self, rank: int, spec: OutputSpec) -> bool:
        if self.everywhere or not (isinstance(spec, Gradient) and isinstance(spec.of, Parameter)):
            return True
        return rank in self._readers.get(spec.of, ())

    @cached_property
    def _readers(self) -> dict[Parameter, set[int]]:
        return self.partition.readers(self.schedule.placement)

    def _result(self, spec: OutputSpec, name: str) -> fx.Node | None:
        if name in self._sharded:
            return self.sharded.rows_of(name)
        source = self.values.source(name)
        here = source is None or self.schedule.placement[source.stage] == self.step.rank
        return self.step.value(name, None) if here or self._is_for(self.step.rank, spec) else None


def _communicates(part: Part) -> bool:
    return any(node.target in redistributions.COLLECTIVES for node in part.gm.graph.nodes)
