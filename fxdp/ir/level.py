"""How far a graph has come on its way to a program: what a pass requires and what it ensures."""

from __future__ import annotations

import enum


class Level(enum.IntEnum):
    """What holds of a graph; each level includes those before it."""

    CAPTURED = 1
    """One flat joint graph without skip marks; every node has a type; inputs and results have slots."""
    PLACED = 2
    """Every tensor node has a placement, and the placements of its operands."""
    EXPLICIT = 3
    """No edge needs a redistribution; each collective has one wait; Partial flows through linear ops only."""
    LOCAL = 4
    """Sizes are this rank's, made from the program's size slots; no captured SymInt is left."""
    STAGED = 5
    """Every node has its stage."""
    EMITTED = 6
    """Only executable functions are left: aten ops, functional collectives, stage calls."""
