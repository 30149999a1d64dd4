"""How far a graph has come on its way to a program: what a pass requires and what it ensures."""

from __future__ import annotations

import enum


class Level(enum.IntEnum):
    """What holds of a graph; each level includes those before it."""

    CAPTURED = 1
    """One flat joint graph; every node has a type; inputs and results have slots."""
    ROUTED = 2
    """No skip markers are left."""
    PLACED = 3
    """Every tensor node has a placement, and the placements of its operands."""
    EXPLICIT = 4
    """No edge needs a conversion; each collective has one wait; Partial flows through linear ops only."""
    LOCAL = 5
    """Sizes are this rank's, made from the program's size slots; no captured SymInt is left."""
    STAGED = 6
    """Every node has its stage."""
    EMITTED = 7
    """Only executable functions are left: aten ops, functional collectives, stage calls."""
