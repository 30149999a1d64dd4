"""Cutting one program into stages and phases, and into a graph for each."""

from fxdp.staging.cut import assign
from fxdp.staging.partition import Edge, Part, Partition, Total
from fxdp.staging.phases import Phases, find_phases, recall_phases
from fxdp.staging.split import split

__all__ = [
    "Edge",
    "Part",
    "Partition",
    "Phases",
    "Total",
    "assign",
    "find_phases",
    "recall_phases",
    "split",
]
