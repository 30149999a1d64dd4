"""What a program is after it is cut: parts, and what they hand to one another."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxdp.annotations import Crossing, ResultSlot, Site, TensorType
from fxdp.placements import Placement


@dataclass(frozen=True)
class Edge:
    """A value that one stage sends to another for every micro-batch."""

    name: str
    """The value's node in the whole program."""
    source: int
    target: int
    backward: bool
    type: TensorType
    placement: Placement
    site: Site
    skip: str = ""
    """The skip connections that it carries, by name."""


@dataclass(frozen=True)
class Total:
    """A value of the micro-batches of one stage that is put together once per step."""

    name: str
    stage: int
    backward: bool
    type: TensorType
    placement: Placement


@dataclass
class Part:
    """One part of a program: a joint graph whose slots say what comes from other parts and goes there."""

    gm: fx.GraphModule
    reads: tuple[Crossing, ...]
    """What comes from other parts."""
    gives: tuple[str, ...]
    """The names of its results, which other parts or the step's results read, in their order."""


@dataclass
class Partition:
    """A program in parts. The union of the parts is the program."""

    stages: int
    prologue: Part | None
    parts: tuple[Part, ...]
    """Per stage, forward and backward of one micro-batch."""
    epilogues: tuple[Part | None, ...]
    """Per stage, what runs once per step after its last micro-batch."""
    edges: tuple[Edge, ...]
    totals: dict[str, Total]
    """Values of micro-batches that epilogues or results read, by name."""
    results: tuple[tuple[ResultSlot, str, int], ...]
    """The program's results: slot, name of the value, stage that has it."""
