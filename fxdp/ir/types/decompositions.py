"""Rewrites that a rule asks for beside a placement: changed arguments, or several ops in place of one.

Both are values without a graph: `rules/` creates them, a node's metadata holds them, and two passes apply
them (`passes/expand_decompositions.py`, `passes/localize_shapes.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxdp.ir.types.placements import Dim, Placement
from fxdp.ir.types.sizes import OFFSET
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import OpOverload


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Changes to an op's arguments on one rank, beyond the general rules of localization.

    Attributes
    ----------
    local : names of schema arguments whose sizes count the rank's own batch (slice bounds on the sharded dim,
        group_norm's N); every remaining number stays global.
    minus_offset : operands whose values are global row numbers and must count from the rank's first row.
    offset : the number of that row, in `offset`.
    own_columns : operands, with a dim of each, of which the rank reads its own range of the axis only.
    axis : the batch axis of these columns, by name.
    arguments : schema arguments with new values, in `B`, `b` and `offset` (a diagonal's offset).
    target : the op that runs instead, if the original fails for 0 or 1 local samples (`split` of an empty
        part, `squeeze` of a single sample); it has the same tensor arguments.
    """

    local: tuple[str, ...] = ()
    minus_offset: tuple[int, ...] = ()
    offset: Dim = OFFSET
    own_columns: tuple[tuple[int, int], ...] = ()
    axis: str = ""
    arguments: tuple[tuple[str, Any], ...] = ()
    target: OpOverload | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """Value in a decomposition: the op's operand `index`, or (negative) step `-index`, counted from 1."""

    index: int
    type: TensorType
    at: Placement


@dataclass(frozen=True, slots=True)
class DecompositionStep:
    """One op of a decomposition: arguments, with terms in the placement in which they are read, and result.

    Sizes among the arguments are the rank's local sizes.
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    type: TensorType
    at: Placement


@dataclass(frozen=True, slots=True)
class Decomposition:
    """Ops that together compute one op along a sharded dim (`rules/builder.py`).

    Attributes
    ----------
    results : the term of each output, or None for an output that is no tensor.
    bytes : bytes sent by the reductions between the steps, in the cost model's units.
    """

    steps: tuple[DecompositionStep, ...]
    results: tuple[Term | None, ...]
    bytes: int
