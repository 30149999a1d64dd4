"""The levels of a graph on the way to a program: each pass requires one and ensures one."""

from __future__ import annotations

import enum


class Level(enum.IntEnum):
    """Level of a graph; each level includes the guarantees of all lower ones."""

    CAPTURED = 1
    """One flat joint graph without skip marks; every node has a type; inputs and results have specs."""
    PLACED = 2
    """Every tensor node has a placement, and required placements for the operands."""
    EXPLICIT = 3
    """No edge needs a redistribution; each collective has one wait; Partial flows through linear ops only."""
    LOCAL = 4
    """Sizes are this rank's, computed from the program's size inputs; no captured SymInt is left."""
    STAGED = 5
    """Every node has a pipeline stage."""
    EMITTED = 6
    """Only executable functions are left: aten ops, functional collectives, stage calls."""
