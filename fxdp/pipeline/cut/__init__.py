"""Cutting one program into stages and phases, and into a graph for each."""

from fxdp.pipeline.cut.cut import assign
from fxdp.pipeline.cut.partition import CutEdge, Part, Partition, Total
from fxdp.pipeline.cut.phases import Phases, find_phases, recall_phases
from fxdp.pipeline.cut.split import split

__all__ = [
    "CutEdge",
    "Part",
    "Partition",
    "Phases",
    "Total",
    "assign",
    "find_phases",
    "recall_phases",
    "split",
]
