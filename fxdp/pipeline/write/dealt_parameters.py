"""Rows of parameters that pipeline ranks hold for one another: to the stages that read them, gradients back.

    rows of w on two pipeline ranks of one data rank       rank 0: w0 w1        rank 1: w2
    %rows = rows()                                         before the first micro-batch
    %rows_to1 = pack([%w, ...]) -> send_forward            rank 1's stage reads w:  rank 0 sends w0 w1
    %w = whole_rows([%w_of0, %w_of1])                      w0 w1 w2: what a data rank has, which is gathered
    ...
    %dealt_w = piece(%scatter_rows, 2, 3)                  the gradient's rows at the end, each to its holder

So a rank holds as little of a model in a pipeline as on as many data ranks, whichever stages it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxdp.ir import raw_bytes
from fxdp.ir.ops.parameter_rows import dealt_range
from fxdp.ir.slots import Parameter
from fxdp.ir.types import TensorType
from fxdp.pipeline.cut.partition import Part, Partition
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.write.step_graph import StepGraph
from fxdp.runtime import p2p

ROWS = "rows"
"""The module that gives what this rank holds, in the order of `held_rows`."""
PARAMETERS = "parameters"
"""The name of a transfer of rows, whose values are parameters."""


def held_rows(partition: Partition, dealing: Sequence[tuple[int, int]]) -> dict[Parameter, TensorType]:
    """The parameters of which pipeline ranks hold rows for one another, in an order of names.

    They are those that any stage gathers, if rows are dealt out over pipeline ranks, too.
    """
    found: dict[Parameter, TensorType] = {}
    if len(dealing) == 1:
        return found
    for part in partition.gathers:
        found |= part.parameters if part is not None else {}
    return dict(sorted(found.items(), key=lambda item: item[0].name))


@dataclass
class DealtParameters:
    """Writes the transfers of one rank.

    Parameters
    ----------
    tag : the number of the last transfer; each takes the next, on all ranks alike.
    """

    step: StepGraph
    partition: Partition
    schedule: Schedule
    tag: int
    types: dict[Parameter, TensorType] = field(init=False)
    """The parameters of which pipeline ranks hold rows."""

    def __post_init__(self) -> None:
        self.types = held_rows(self.partition, self.step.dealing)

    # ---- before the first micro-batch ----------------------------------------------------------------------

    def collect(self) -> None:
        """Bring the rows of the parameters that each rank's stages read to it."""
        if not self.types:
            return
        made = self.step.module(ROWS, (), ROWS)
        own = {slot: self.step.item(made, i, f"own_{slot.name}") for i, slot in enumerate(self.types)}
        pieces = {self.step.rank: own}
        for source, target, slots in self._collected():
            self._bring(slots, source, target, own, pieces)
        for slot in self._read_by(self.step.rank):
            every = [pieces[rank][slot] for rank in range(len(self.schedule.ranks))]
            whole = self.step.function(p2p.whole_rows, (every,), f"rows_of_{slot.name}")
            self.step.keep(_key(slot), None, whole)

    def skip_collecting(self) -> None:
        """Another program collects; its transfers have numbers of their own all the same."""
        self.tag += len(self._collected())

    def _collected(self) -> list[tuple[int, int, list[Parameter]]]:
        """Source and target of each transfer, and the parameters in it."""
        ranks = range(len(self.schedule.ranks))
        pairs = [(source, target) for source in ranks for target in ranks if source != target]
        return [(source, target, slots) for source, target in pairs if (slots := self._read_by(target))]

    def gathered(self, part: Part) -> list[fx.Node]:
        """What a stage's gather takes besides the batch: the rows of its data rank, by parameter."""
        return [self.step.value(_key(slot), None) for slot in part.parameters] if self.types else []

    def _bring(
        self, slots: Sequence[Parameter], source: int, target: int, own: Mapping[Parameter, fx.Node],
        pieces: dict[int, dict[Parameter, fx.Node]],
    ) -> None:  # fmt: skip
        self.tag += 1
        shapes = [self._shape(self.types[slot], source) for slot in slots]
        values = [own[slot] for slot in slots]
        dtypes = [self.types[slot].dtype for slot in slots]
        names = [slot.name for slot in slots]
        got = self._travel(PARAMETERS, names, values, shapes, dtypes, (source, target), backward=False)
        if got is not None:
            pieces[source] = {slot: self.step.item(got, i, slot.name) for i, slot in enumerate(slots)}

    def _read_by(self, rank: int) -> list[Parameter]:
        """The parameters that the stages of a rank gather."""
        placement, gathers = self.schedule.placement, self.partition.gathers
        own = [p for p, home in zip(gathers, placement, strict=True) if p is not None and home == rank]
        read = {slot for part in own for slot in part.parameters}
        return [slot for slot in self.types if slot in read]

    # ---- after the last one --------------------------------------------------------------------------------

    def deal(self, gradients: Mapping[str, TensorType], source: int) -> None:
        """Bring rows of gradients to their holders from the pipeline rank that has a data rank's."""
        if not gradients:
            return
        for target in range(len(self.schedule.ranks)):
            self.tag += source != target
            shapes = [self._shape(type_, target) for type_ in gradients.values()]
            values = []
            if self.step.rank == source:
                values = [self._piece(name, type_, target) for name, type_ in gradients.items()]
            if source == target:
                self._keep(gradients, values)
                continue
            dtypes = [type_.dtype for type_ in gradients.values()]
            got = self._travel(
                "gradients", list(gradients), values, shapes, dtypes, (source, target), backward=True
            )
            if got is not None:
                self._keep(gradients, [self.step.item(got, i, n) for i, n in enumerate(gradients)])

    def rows_of(self, name: str) -> fx.Node:
        """This rank's rows of a gradient."""
        return self.step.value(f"rows of {name}", None)

    def _keep(self, gradients: Mapping[str, TensorType], values: Sequence[fx.Node]) -> None:
        for name, value in zip(gradients, values, strict=False):
            self.step.keep(f"rows of {name}", None, value)

    def _piece(self, name: str, type_: TensorType, rank: int) -> fx.Node:
        first, _ = self._range(type_)
        start, end = self._range(type_, rank)
        value = self.step.value(name, None)
        return self.step.function(p2p.piece, (value, start - first, end - first), f"dealt_{name}")

    # ---- both ----------------------------------------------------------------------------------------------

    def _travel(
        self, label: str, names: Sequence[str], values: Sequence[fx.Node], shapes: list[list[int]],
        dtypes: list[torch.dtype], ends: tuple[int, int], *, backward: bool,
    ) -> fx.Node | None:  # fmt: skip
        """This rank's share of a transfer of values as one row of bytes; at its target, the values."""
        source, target = ends
        size = raw_bytes.packed_size(shapes, dtypes)
        if self.step.rank == source:
            packed = self.step.function(raw_bytes.pack, (list(values),), f"{label}_to{target}")
            self.step.send(packed, target, self.tag, label, backward=backward)
            self.step.record(label, ends, [size], torch.uint8, self.tag, backward=backward, values=names)
        if self.step.rank != target:
            return None
        args: tuple[Any, ...] = ([size], torch.uint8, source, self.tag, label)
        pending = self.step.receive(*args, backward=backward)
        packed = self.step.function(p2p.wait, (pending,), f"{label}_of{source}")
        return self.step.function(raw_bytes.unpack, (packed, shapes, dtypes), f"unpacked_of{source}")

    def _shape(self, type_: TensorType, rank: int) -> list[int]:
        """The shape of a pipeline rank's rows."""
        first, last = self._range(type_, rank)
        return [last - first, *map(int, type_.shape[1:])]

    def _range(self, type_: TensorType, rank: int | None = None) -> tuple[int, int]:
        """The rows of this rank's data rank, or of one of its pipeline ranks."""
        data, (count, _) = self.step.dealing
        dealing = [data] if rank is None else [data, (count, rank)]
        return dealt_range(int(type_.shape[0]), dealing)


def _key(slot: Parameter) -> str:
    return f"rows of parameter {slot.name}"
