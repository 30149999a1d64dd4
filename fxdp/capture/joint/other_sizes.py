"""Conditions under which the formulas of static traces hold at batch sizes that were not traced.

    k = min(n, 16)          3, 5, 7, 10 at these sizes: a formula "B" that is wrong for 20
    max(n - 1, 1)           2, 4, 6, 9: a formula "B - 1" that is wrong for 1

A threshold between two traced sizes fits no formula, and one of them is even, the others odd: so formulas
hold up to the largest traced size. Of the smaller sizes the forward alone is traced, and compared with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import sympy
from torch import fx
from torch.utils import _pytree as pytree

from fxdp.capture.captured import Condition
from fxdp.capture.joint.fit import fit_number
from fxdp.ir.graph.metadata import Location
from fxdp.ir.types.sizes import B

ForwardOps: TypeAlias = "list[tuple[Any, list[Any]]]"
"""For each op of a forward graph its target, and its arguments: operands by name."""

_OF_ONE = (
    "the model's Python code takes the batch size for a constant, and computes in another way for the one "
    "sample of this call than for several; expected a global batch of at least 2 samples"
)


def ops_of(gm: fx.GraphModule) -> ForwardOps:
    """Return the ops of a forward graph; its joint trace rewrites the graph."""
    leaves = pytree.tree_leaves
    return [(n.target, [*map(_named, leaves((n.args, n.kwargs)))]) for n in gm.graph.nodes]


def _named(value: Any) -> Any:
    return value.name if isinstance(value, fx.Node) else value


def conditions_of(
    batches: Sequence[int], traced: Sequence[ForwardOps], few: Sequence[ForwardOps | None]
) -> tuple[Condition, ...]:
    """Return the conditions on the batch size under which a graph fitted to these traces is the model's.

    `traced` are the forwards at `batches`, `few` those at one sample, two, ...: None where the code fails.
    """
    found = [Condition(sympy.Le(B, max(batches)), Location())]
    # for a larger batch, and for two samples, the model is captured again, with a trace at that size
    for size, ops in enumerate(few, start=1):
        if ops is None or not _holds(batches, traced, size, ops):
            found.append(Condition(sympy.Ne(B, size), Location(), _OF_ONE if size == 1 else ""))
    return tuple(found)


def _holds(batches: Sequence[int], traced: Sequence[ForwardOps], size: int, ops: ForwardOps) -> bool:
    rows = [*traced, ops]
    if len({len(row) for row in rows}) > 1:
        return False
    for op in zip(*rows, strict=True):
        if len({(target, len(values)) for target, values in op}) > 1:
            return False
        columns = zip(*(values for _, values in op), strict=True)
        if not all(_continues(batches, column, size, value) for *column, value in columns):
            return False
    return True


def _continues(batches: Sequence[int], values: Sequence[Any], size: int, value: Any) -> bool:
    """Return whether a value is what the formula of the others gives at this size."""
    if all(type(other) is type(value) and other == value for other in values):
        return True
    formula = fit_number(batches, values) if type(values[0]) is type(value) else None
    return formula is not None and bool(formula.xreplace({B: sympy.Integer(size)}) == value)
