"""What a rule wants done to an op beside placing it: other arguments, or several ops in its place.

Values without a graph: `rules/` writes them, a node's note carries them, and two passes carry them out
(`passes/expand_decompositions.py`, `passes/localize_shapes.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxdp.ir.placements import Placement
from fxdp.ir.types import TensorType
from fxdp.torch_compat import OpOverload


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What localization must do to the arguments beyond the general rules (design.md 5).

    `local`: names of schema arguments whose sizes count the rank's own batch (slice bounds on the
    sharded dim, group_norm's N); every other number stays global.
    `minus_offset`: operands whose values are global row numbers and must count from the rank's first.
    `arguments`: schema arguments with their new values, in `B`, `b` and `offset` (a diagonal's offset).
    `target`: the op that runs instead, where the op itself cannot say it for 0 or 1 local samples
    (`split` of an empty part, `squeeze` of a single sample); it has the op's tensor arguments.
    """

    local: tuple[str, ...] = ()
    minus_offset: tuple[int, ...] = ()
    arguments: tuple[tuple[str, Any], ...] = ()
    target: OpOverload | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """A value in a recipe: operand `index` of the op, or (negative) the step `-index`, counted from 1."""

    index: int
    type: TensorType
    at: Placement


@dataclass(frozen=True, slots=True)
class DecompositionStep:
    """One op of a recipe: its arguments, with terms in the placement in which they are read, and its result.

    Sizes among the arguments are those of the rank.
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    type: TensorType
    at: Placement


@dataclass(frozen=True, slots=True)
class Decomposition:
    """Ops that together do what one op does on a dim that is in parts (`rules/builder.py`).

    `results`: the term of each output, or None for one that is no tensor. `bytes`: what the reductions
    between the steps send, in the chooser's units.
    """

    steps: tuple[DecompositionStep, ...]
    results: tuple[Term | None, ...]
    bytes: int
