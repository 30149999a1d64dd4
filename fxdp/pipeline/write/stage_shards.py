"""Transfers of parameters sharded over pipeline ranks: shards to the stages that read them, gradients back.

    shards of w on two pipeline ranks of one data rank     rank 0: w0 w1        rank 1: w2
    %rows = rows()                                         before the first micro-batch
    %rows_to1 = pack([%w, ...]) -> send_forward            rank 1's stage reads w:  rank 0 sends w0 w1
    %w = cat([%w_of0, %w_of1])                             w0 w1 w2: the data rank's shard, to be all-gathered
    ...
    %dealt_w = piece(%reduce_scatter_shards, 2, 3)         the gradient's rows at the end, each to its holder

So a rank of a pipeline stores as little of a model as one of equally many data ranks, whatever its stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from fxdp.ir.graph.signature import Parameter
from fxdp.ir.ops.parameter_shards import shard_range
from fxdp.ir.types.value_types import TensorType
from fxdp.pipeline.cut.partition import Part, Partition
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.write.step_graph import StepGraph
from fxdp.runtime import p2p

ROWS = "rows"
"""The module that returns this rank's local shards, in the order of `stage_sharded`."""
PARAMETERS = "parameters"
"""The name of a transfer of parameter shards."""


def stage_sharded(partition: Partition, sharding: Sequence[tuple[int, int]]) -> dict[Parameter, TensorType]:
    """Return the parameters that are sharded over pipeline ranks, sorted by name.

    These are all parameters that a stage gathers, if the sharding includes pipeline ranks.
    """
    found: dict[Parameter, TensorType] = {}
    if len(sharding) == 1:
        return found
    for part in partition.gathers:
        found |= part.parameters if part is not None else {}
    return dict(sorted(found.items(), key=lambda item: item[0].name))


@dataclass
class StageShards:
    """Writer of one rank's transfers of shards."""

    step: StepGraph
    partition: Partition
    schedule: Schedule
    types: dict[Parameter, TensorType] = field(init=False)
    """The parameters that are sharded over pipeline ranks."""

    def __post_init__(self) -> None:
        self.types = stage_sharded(self.partition, self.step.sharding)

    # ---- before the first micro-batch ----------------------------------------------------------------------

    def collect(self) -> None:
        """Send the shards of each parameter to all ranks with a stage that reads the parameter."""
        if not self.types:
            return
        made = self.step.module(ROWS, (), ROWS)
        own = {spec: self.step.item(made, i, f"own_{spec.name}") for i, spec in enumerate(self.types)}
        pieces = {self.step.rank: own}
        for source, target, specs in self._collected():
            types = {s.name: (self._shape(self.types[s], source), self.types[s].dtype) for s in specs}
            given = {spec.name: own[spec] for spec in specs}
            got = self.step.hand_over(PARAMETERS, types, source, [target], given.__getitem__, backward=False)
            if got:
                pieces[source] = {spec: got[spec.name] for spec in specs}
        for spec in self._read_by(self.step.rank):
            every = [pieces[rank][spec] for rank in range(len(self.schedule.ranks))]
            full = self.step.function(torch.cat, (every,), f"rows_of_{spec.name}")
            self.step.keep(_key(spec), None, full)

    def skip_collecting(self) -> None:
        """Skip the transfers that a separate program makes, but reserve their tags."""
        self.step.tag += len(self._collected())

    def _collected(self) -> list[tuple[int, int, list[Parameter]]]:
        """Return source, target and parameters of each transfer."""
        ranks = range(len(self.schedule.ranks))
        pairs = [(source, target) for source in ranks for target in ranks if source != target]
        return [(source, target, specs) for source, target in pairs if (specs := self._read_by(target))]

    def gathered(self, part: Part) -> list[fx.Node]:
        """Return a stage's extra arguments for the all-gather: the data rank's shard of each parameter."""
        return [self.step.value(_key(spec), None) for spec in part.parameters] if self.types else []

    def _read_by(self, rank: int) -> list[Parameter]:
        """Return the parameters that the stages of a rank gather."""
        placement, gathers = self.schedule.placement, self.partition.gathers
        own = [p for p, home in zip(gathers, placement, strict=True) if p is not None and home == rank]
        read = {spec for part in own for spec in part.parameters}
        return [spec for spec in self.types if spec in read]

    # ---- after the last one --------------------------------------------------------------------------------

    def send_to_owners(self, gradients: Mapping[str, TensorType], source: int) -> None:
        """Send rows of reduced gradients from `source` to the ranks that hold these rows of parameters."""
        if not gradients:
            return
        for target in range(len(self.schedule.ranks)):
            given = {}
            if self.step.rank == source:
                given = {name: self._piece(name, type_, target) for name, type_ in gradients.items()}
            if source != target:
                types = {name: (self._shape(type_, target), type_.dtype) for name, type_ in gradients.items()}
                given = self.step.hand_over(
                    "gradients", types, source, [target], given.__getitem__, backward=True
                )
            if self.step.rank == target:
                for name, value in given.items():
                    self.step.keep(f"rows of {name}", None, value)

    def rows_of(self, name: str) -> fx.Node:
        """Return this rank's rows of a gradient."""
        return self.step.value(f"rows of {name}", None)

    def _piece(self, name: str, type_: TensorType, rank: int) -> fx.Node:
        first, _ = self._range(type_)
        start, end = self._range(type_, rank)
        value = self.step.value(name, None)
        return self.step.function(p2p.piece, (value, start - first, end - first), f"dealt_{name}")

    # ---- both ----------------------------------------------------------------------------------------------

    def _shape(self, type_: TensorType, rank: int) -> list[int]:
        """Return the shape of a pipeline rank's shard."""
        first, last = self._range(type_, rank)
        return [last - first, *map(int, type_.shape[1:])]

    def _range(self, type_: TensorType, rank: int | None = None) -> tuple[int, int]:
        """Return the range of rows of this data rank, or of one pipeline rank within."""
        data, (count, _) = self.step.sharding
        sharding = [data] if rank is None else [data, (count, rank)]
        return shard_range(int(type_.shape[0]), sharding)


def _key(spec: Parameter) -> str:
    return f"rows of parameter {spec.name}"
